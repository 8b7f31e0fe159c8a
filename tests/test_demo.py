"""The demo's model and tables: whole, balanced, apart from each other, and as good as recorded."""

import csv
import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from qtool import demo
from qtool.core import QtoolError, Unavailable, file_hash

PACKAGE = demo.BASE_PACKAGE.replace("-", "_")
PROVENANCE = json.loads(demo.DELTA.with_name("provenance.json").read_text(encoding="utf-8"))

needs_base = pytest.mark.skipif(
    find_spec(PACKAGE) is None or find_spec("safetensors") is None,
    reason=f"needs {demo.BASE_PACKAGE} and safetensors: pip install 'qtool[demo]'",
)


def read_table(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    header = lines[0].split("\t")
    return [dict(zip(header, line.split("\t"), strict=True)) for line in lines[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("demo") / "model"
    demo.build_model(dest)
    return dest


@pytest.fixture
def fake_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the base's name, found before the real one, whose weights are other bytes."""
    model = tmp_path / PACKAGE / "model"
    model.mkdir(parents=True)
    (tmp_path / PACKAGE / "__init__.py").write_text("raise AssertionError('imported')\n")
    (model / "model.safetensors").write_bytes(b"other")
    monkeypatch.syspath_prepend(tmp_path)
    return model


def test_eval_table_holds_500_rows_of_either_label():
    rows = read_table(demo.EVAL_TABLE)
    assert Counter(row["label"] for row in rows) == {"negative": 500, "positive": 500}
    assert len({row["id"] for row in rows}) == 1000


def test_calibration_table_is_balanced_and_apart_from_the_eval_table():
    rows = read_table(demo.CALIBRATION_TABLE)
    assert Counter(row["label"] for row in rows) == {"negative": 128, "positive": 128}
    scored = read_table(demo.EVAL_TABLE)
    for column in ("id", "sentence"):
        assert not {row[column] for row in rows} & {row[column] for row in scored}


@pytest.mark.parametrize("table", [demo.EVAL_TABLE, demo.CALIBRATION_TABLE], ids=lambda path: path.stem)
def test_a_reader_that_knows_quoting_reads_the_same_rows(table):
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        with table.open(encoding="utf-8", newline="") as file:
            assert list(csv.DictReader(file, delimiter="\t", quoting=quoting)) == read_table(table)


def test_what_ships_is_at_most_3_mb():
    assert demo.DELTA.stat().st_size <= 3_000_000
    assert file_hash(demo.DELTA) == PROVENANCE["delta_sha256"]


def test_a_missing_base_package_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "BASE_PACKAGE", "no-such-base")
    with pytest.raises(Unavailable, match=r"pip install 'qtool\[demo\]'"):
        demo.build_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_base_with_the_wrong_hash_is_refused_and_not_imported(fake_base):
    with pytest.raises(QtoolError) as error:
        demo.find_base()
    assert demo.BASE_SHA256 in str(error.value)
    assert file_hash(fake_base / "model.safetensors") in str(error.value)


def test_a_base_package_without_its_weights_is_unavailable(fake_base):
    (fake_base / "model.safetensors").unlink()
    with pytest.raises(Unavailable, match="no file"):
        demo.find_base()


@needs_base
def test_finding_and_merging_the_base_imports_neither_it_nor_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from qtool import demo\n"
        "heavy = {'numpy', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "demo.build_model(Path(sys.argv[1]))\n"
        f"heavy = {{'torch', 'transformers', 'sentence_transformers', {PACKAGE!r}}} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model")], check=True)


@needs_base
def test_the_built_model_has_the_recorded_bytes_and_nothing_is_left_beside_it(folder):
    assert file_hash(folder / "model.safetensors") == PROVENANCE["model_sha256"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert list(folder.parent.iterdir()) == [folder]


@needs_base
def test_an_existing_folder_is_not_overwritten(tmp_path):
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(QtoolError, match="exists already"):
        demo.build_model(tmp_path)
    assert (tmp_path / "keep").read_text() == "mine"


@needs_base
def test_a_merge_adds_the_product_of_the_factors_to_the_base_matrix():
    import numpy as np

    base = {"w": np.eye(2, 3, dtype=np.float32), "embeddings.position_ids": np.arange(3)}
    delta = {
        "bert.w.up": np.array([[1], [2]], dtype=np.float16),
        "bert.w.down": np.array([[0.5, 0, 4]], dtype=np.float16),
        "head": np.ones(2, dtype=np.float32),
    }
    merged = demo.merge(base, delta)
    assert sorted(merged) == ["bert.w", "head"]
    assert merged["bert.w"].tolist() == [[1.5, 0, 4], [1, 1, 8]]
    assert merged["bert.w"].dtype == np.float32


@needs_base
def test_config_and_tokenizer_load_as_a_two_label_classifier_without_fixed_padding(folder):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == ["BertForSequenceClassification"]
    assert config.id2label == {0: "negative", 1: "positive"}
    assert config.label2id == {"negative": 0, "positive": 1}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 512
    assert tokenizer("A Fine film.")["input_ids"] == [101, 1037, 2986, 2143, 1012, 102]
    assert tokenizer.pad_token == "[PAD]"
    assert len(tokenizer("fine " * 300)["input_ids"]) == 302


@pytest.mark.slow
@needs_base
def test_the_merged_model_scores_as_recorded(folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = sorted(read_table(demo.EVAL_TABLE), key=lambda row: len(row["sentence"]))
    correct = 0
    with torch.inference_mode():
        for start in range(0, len(rows), 25):
            part = rows[start : start + 25]
            batch = tokenizer([row["sentence"] for row in part], padding=True, return_tensors="pt")
            for row, found in zip(part, model.eval()(**batch).logits.argmax(-1).tolist(), strict=True):
                correct += model.config.id2label[found] == row["label"]
    assert abs(correct - PROVENANCE["correct"]) <= 1
    assert correct / len(rows) >= 0.86
