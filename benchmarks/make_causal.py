"""Write a causal classifier of SmolLM2-135M's shape with random weights, for sizes and speeds without a download.

    python benchmarks/make_causal.py OUT
    qtool sweep OUT --no-score

Target: 134 to 135 million parameters, the same bytes at every run. Llama blocks: 30 layers, width 576, 9 heads over
3 of keys and values, 1536 inside, 49,152 words of which the demo's tokenizer names 30,522 (Ben Allal et al. 2025,
SmolLM2, https://arxiv.org/abs/2502.02737, and the model's config). Its answers mean nothing.
"""

from __future__ import annotations

from pathlib import Path

from make_distilbert import LABELS, SEED, main, tokenizer


def write(out: Path, base: Path) -> int:
    """Save a model and `base`'s tokenizer to `out`; the number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    words = tokenizer(base)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.cls_token_id,
        eos_token_id=words.sep_token_id,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(out)
    words.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main(__doc__, write)
