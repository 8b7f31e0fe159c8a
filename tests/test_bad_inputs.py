"""What a user gets wrong: one line that says what is wrong, what was found, what would work; exit code 2."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from qtool import cli, isolate, worker
from qtool.core import QtoolError
from tests.conftest import make_checkpoint, need, qtool, write_table

# (name, arguments, what the line must say); {m} a model folder, {t} its table, {d} a folder to break things in
TABLE = "--task text --data {t} --text text --label label"
CASES = [
    ("unknown verb", "swep {m}", "Did you mean 'sweep'?"),
    ("no verb", "", "VERB"),
    ("no model", "sweep", "MODEL"),
    ("unknown flag", "sweep {m} --recipes fp32", "Did you mean '--recipe'?"),
    ("unknown task", "sweep {m} --task sst-2", "Did you mean 'sst2'?"),
    ("no task", "sweep {m}", "Give --task NAME"),
    ("unknown recipe", "sweep {m} --no-score --recipe int8-dynamc", "Did you mean 'int8-dynamic'?"),
    ("glob without a match", "sweep {m} --no-score --recipe zz*", "no recipe is called 'zz*'"),
    ("recipe file missing", "sweep {m} --no-score --recipe {d}/none.yaml", "cannot read recipe"),
    ("recipe shown by an unknown name", "recipes bf61", "Did you mean 'bf16'?"),
    ("task shown by an unknown name", "tasks sst", "Did you mean 'sst2'?"),
    ("unknown device", "sweep {m} --no-score --device tpu", "invalid choice: 'tpu'"),
    ("no GPU", "sweep {m} --no-score --device cuda", "none is visible"),
    ("rounds of zero", "sweep {m} --no-score --rounds 0", "0 is out of range, expected 1 or more"),
    ("rounds that are a word", "sweep {m} --no-score --rounds many", "'many' is not a whole number, or auto"),
    ("a width that is no percentage", "sweep {m} --no-score --speedup-within 0.1", "such as 10%"),
    ("a budget without a unit", "sweep {m} --no-score --time-budget 30", "the unit is missing"),
    (
        "a budget of an unknown unit",
        "sweep {m} --no-score --time-budget 30m",
        "unknown unit 'm'. Known: h, min, s",
    ),
    ("policy missing", "sweep {m} --no-score --policy {d}/none.yaml", "cannot read the policy"),
    (
        "policy on an unknown recipe",
        "sweep {m} --no-score --policy {d}/policy.yaml",
        "'bf61' is not in the run",
    ),
    ("a gate without a policy", "gate {d}/run", "--policy"),
    ("a gate on no run", "gate {d} --policy {d}/policy.yaml", "holds no run"),
    ("a pick from no run", "pick {d}", "holds no run"),
    ("a comparison with no run", "compare {d} {d}", "holds no run"),
    ("negative batch", "sweep {m} --no-score --batch-size -1", "expected"),
    ("batch that is no number", "sweep {m} --no-score --batch-size two", "'two' is not a whole number"),
    ("limit of zero", "sweep {m} --no-score --limit 0", "out of range"),
    ("threads of zero", "sweep {m} --no-score --threads 0", "out of range"),
    ("timeout of nan", "sweep {m} --no-score --timeout nan", "out of range"),
    ("timeout beyond reason", "sweep {m} --no-score --timeout 1e300", "at most a week"),
    ("batch beyond reason", "sweep {m} --no-score --batch-size 1000000000", "at most 65536"),
    ("length of zero", "sweep {m} --no-score --seq-len 0", "out of range"),
    ("length that is a word", "sweep {m} --no-score --seq-len long", "or 'real'"),
    (
        "length over the model's",
        "sweep {m} --no-score --seq-len 65",
        "longer than the model takes (64 tokens)",
    ),
    ("resume without a folder", "sweep {m} --no-score --resume", "--resume needs --out DIR"),
    ("resume of nothing", "sweep {m} --no-score --resume --out {d}/none", "nothing to resume"),
    ("a run stands there", "sweep {m} --no-score --out {d}/run", "already holds a run. Add --resume"),
    ("out holds the user's own files", "sweep {m} --no-score --out {d}", "is not empty and holds no run"),
    ("out is the current folder", "sweep {m} --no-score --out .", "names no folder of its own"),
    ("out is too long", f"sweep {{m}} --no-score --out {'x' * 300}", "File name too long"),
    ("recipe's name is too long", f"recipes {'x' * 300}", "File name too long"),
    ("out is a file", "sweep {m} --no-score --out {t}", "is a file"),
    ("model that is no folder", "sweep {d}/nothing --no-score", "is not a model folder"),
    (
        "model that is nonsense",
        "sweep owner//x y --no-score",
        "unknown argument|neither a folder|not a model",
    ),
    ("alias misspelt, offline", "sweep distilbrt --task sst2", "Did you mean 'distilbert'?"),
    (
        "hub id while offline",
        "sweep some/model --no-score",
        "not in the local cache and HF_HUB_OFFLINE is set",
    ),
    ("revision of a folder", "sweep {m} --no-score --revision main", "is for hub ids"),
    ("revision of the demo", "sweep demo --revision main", "ships with qtool"),
    ("no model among several", "sweep {m} --models {d}/models.yaml", "leave MODEL out"),
    ("several models on one task", "sweep --models {d}/models.yaml --task sst2", "give --task glue"),
    ("one model on all tasks", "sweep {m} --task glue", "give --models FILE"),
    ("models file missing", "sweep --models {d}/none.yaml --task glue", "cannot read --models"),
    ("a wrong entry among several", "sweep --models {d}/models.yaml --task glue", "nothing on sst2: "),
    ("config missing", "sweep {d}/no-config --no-score", "has no config.json"),
    ("config corrupt", "sweep {d}/bad-config --no-score", "is not valid JSON"),
    ("config without a type", "sweep {d}/typeless --no-score", "names no model_type"),
    (
        "config of an unknown type",
        "sweep {d}/unknown-type --no-score",
        "no sequence classifier in transformers. Did you mean 'bert'?",
    ),
    ("config that needs code", "sweep {d}/custom-code --no-score", "needs custom code"),
    ("weights missing", "sweep {d}/no-weights --no-score", "no usable weights: found no .safetensors file"),
    ("weights only as a pickle", "sweep {d}/pickle --no-score", "a pickle"),
    ("weights corrupt", "sweep {d}/bad-weights --no-score", "is damaged"),
    ("weights cut off", "sweep {d}/cut-weights --no-score", "is damaged"),
    ("weights of another shape", "sweep {d}/other-shape --no-score", "do not fit its config.json"),
    ("tokenizer missing", "sweep {d}/no-tokenizer --no-score", "has no tokenizer"),
    ("tokenizer corrupt", "sweep {d}/bad-tokenizer --no-score", "cannot load the tokenizer"),
    ("tokenizer of another model", "sweep {d}/big-tokenizer --no-score", "do not belong together"),
    ("head at random", "sweep {d}/headless --no-score", "would be initialised at random"),
    (
        "data missing",
        "sweep {m} --task text --data {d}/none.csv --text text --label label",
        "there is no table at",
    ),
    (
        "data of an unknown kind",
        "sweep {m} --task text --data {d}/t.xls --text text --label label",
        "cannot tell what kind of table",
    ),
    ("columns not named", "sweep {m} --task text --data {t}", "--text COLUMN and --label COLUMN"),
    ("column missing", "sweep {m} --task text --data {t} --text txt --label label", "Did you mean 'text'?"),
    (
        "one column for two roles",
        "sweep {m} --task text --data {t} --text text --label text",
        "is named twice",
    ),
    (
        "a label that is a list",
        "sweep {m} --task text --data {d}/list.jsonl --text text --label label",
        "line 1: column 'label'",
    ),
    (
        "half a surrogate pair",
        "sweep {m} --task text --data {d}/half.jsonl --text text --label label",
        "line 1: column 'text'",
    ),
    ("metric unknown", f"sweep {{m}} {TABLE} --metric acuracy", "Did you mean 'accuracy'?"),
    (
        "metric of a regression",
        f"sweep {{m}} {TABLE} --metric pearson",
        "needs a model with one real-valued output",
    ),
    ("columns for a task that has its own", "sweep {m} --task demo --text x", "knows its columns"),
    (
        "labels the model does not have",
        "sweep {m} --task text --data {d}/labels.csv --text text --label label",
        "label 'neutral' has no class",
    ),
    (
        "a malformed row",
        "sweep {m} --task text --data {d}/row.csv --text text --label label",
        "line 3 has 1 fields",
    ),
    ("a binary table", "sweep {m} --task text --data {d}/binary.csv --text text --label label", "is binary"),
    ("an empty table", "sweep {m} --task text --data {d}/empty.csv --text text --label label", "is empty"),
    ("a folder that is not GLUE's", "sweep {m} --task sst2 --data {d}", "no SST-2/dev.tsv in"),
    ("another file for a GLUE task", "sweep {m} --task sst2 --data {t}", "has no column 'sentence'"),
    ("nothing for a GLUE task", "sweep {m} --task sst2 --data {d}/none", "is a folder or a file"),
    ("a classifier for ratings", "sweep {m} --task stsb --data {d}/ratings.tsv", "one real-valued output"),
    ("a wrong GLUE label", "sweep {m} --task rte --data {d}/rte.tsv", "line 2: column 'label' holds 'yes'"),
    ("a test split", "sweep {m} --task sst2 --data {d} --split test", "have no labels"),
    ("an unknown split", "sweep {m} --task sst2 --data {d} --split valdation", "Did you mean 'validation'?"),
    ("a split of one's own table", f"sweep {{m}} {TABLE} --split train", "has no"),
    ("calibration missing", f"sweep {{m}} {TABLE} --calibration {{d}}/none.csv", "there is no table at"),
    ("calibration on scored rows", f"sweep {{m}} {TABLE} --calibration {{t}}", "is among the scored rows"),
    ("task without data, offline", "sweep {m} --task sst2", "Give --data DIR"),
    ("report of nothing", "report {d}/none", "holds no run"),
    ("report of a broken run", "report {d}/broken-run", "line 1 is not a measurement"),
    ("report of a newer schema", "report {d}/newer-run", "Upgrade qtool"),
    ("report of a hollow run", "report {d}/run", "lacks metric, model, plan"),
    ("report in an unknown format", "report {d}/run --format pdf", "invalid choice: 'pdf'"),
    ("export of nothing", "export {d}/none fp32 {d}/to", "holds no run"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """{m}, {t} and {d} with everything broken that the cases need."""
    need("torch", "transformers", "tokenizers")
    import torch
    from safetensors.torch import load_file, save_file

    root = tmp_path_factory.mktemp("bad")
    model = make_checkpoint(root / "model")
    table = write_table(root / "films.csv")
    broken = root / "broken"
    broken.mkdir()

    def copy(name: str) -> Path:
        return Path(shutil.copytree(model, broken / name))

    def config(name: str, **changes: object) -> None:
        path = copy(name) / "config.json"
        path.write_text(
            json.dumps(
                {k: v for k, v in {**json.loads(path.read_text()), **changes}.items() if v is not None}
            )
        )

    (copy("no-config") / "config.json").unlink()
    (copy("bad-config") / "config.json").write_text("{")
    config("typeless", model_type=None)
    config("unknown-type", model_type="berd")
    config("custom-code", auto_map={"AutoModel": "x.Y"})
    config("other-shape", hidden_size=32)
    (copy("no-weights") / "model.safetensors").unlink()
    (copy("pickle") / "model.safetensors").rename(broken / "pickle" / "pytorch_model.bin")
    (copy("bad-weights") / "model.safetensors").write_bytes(b"\xff" * 64)
    whole = (model / "model.safetensors").read_bytes()
    (copy("cut-weights") / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for name in ("tokenizer.json", "vocab.txt"):
        (copy("no-tokenizer") if name == "tokenizer.json" else broken / "no-tokenizer").joinpath(name).unlink(
            missing_ok=True
        )
    (copy("bad-tokenizer") / "tokenizer.json").write_text("{")
    tokens = json.loads((model / "tokenizer.json").read_text())
    tokens["model"]["vocab"] |= {f"extra{i}": 1000 + i for i in range(500)}
    (copy("big-tokenizer") / "tokenizer.json").write_text(json.dumps(tokens))
    tensors = {
        k: v for k, v in load_file(model / "model.safetensors").items() if not k.startswith("classifier")
    }
    save_file(
        {k: v.to(torch.float32) for k, v in tensors.items()},
        copy("headless") / "model.safetensors",
        {"format": "pt"},
    )
    (broken / "models.yaml").write_text(f"- {{model: {broken}/nothing, task: sst2}}\n")
    (broken / "policy.yaml").write_text("recipes: {bf61: {max_disk: 1MB}}\n")
    (broken / "list.jsonl").write_text('{"text": "a", "label": ["positive"]}\n')
    (broken / "half.jsonl").write_text('{"text": "a \\ud800", "label": "positive"}\n')
    (broken / "labels.csv").write_text("text,label\na,neutral\n")
    (broken / "row.csv").write_text("text,label\na,positive\nb\n")
    (broken / "ratings.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t2.5\n")
    (broken / "rte.tsv").write_text("sentence1\tsentence2\tlabel\na\tb\tyes\n")
    (broken / "binary.csv").write_bytes(b"text,label\n\x00\x01,positive\n")
    (broken / "empty.csv").write_text("")
    for name, line in (
        ("run", ""),
        ("broken-run", '{"schema_version": 1}\n'),
        ("newer-run", '{"schema_version": 99}\n'),
    ):
        (broken / name).mkdir()
        whole = {"model": "m", "task": None, "metric": None, "rounds": 1, "plan": []}
        keys = {} if name == "run" else whole
        (broken / name / "run.json").write_text(json.dumps({"schema": 1, **keys}))
        (broken / name / "results.jsonl").write_text(line)
    return {"m": str(model), "t": str(table), "d": str(broken)}


def in_this_process(stage, spec, **how):
    """The probe without a process of its own: 40 imports of torch would make the suite slow."""
    try:
        return isolate.Outcome("ok", worker.STAGES[stage](spec))
    except QtoolError as error:
        return isolate.Outcome("user_error", {}, str(error))


@pytest.mark.parametrize(("name", "arguments", "says"), CASES, ids=[case[0] for case in CASES])
def test_a_bad_input_is_one_line_and_exit_code_2(
    name, arguments, says, places, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(isolate, "run", in_this_process)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        cli.main(arguments.format(**places).split())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qtool: ")]
    assert left.value.code == 2
    assert len(lines) == 1
    assert any(part in lines[0] for part in says.split("|")), lines[0]
    assert "Traceback" not in lines[0]
    assert list(tmp_path.iterdir()) == []  # nothing half-written


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").is_dir(), reason="root may write anywhere here")
def test_an_unwritable_output_is_refused(places, monkeypatch, capsys):
    monkeypatch.setattr(isolate, "run", in_this_process)
    with pytest.raises(SystemExit) as left:
        cli.main(["sweep", places["m"], "--no-score", "--out", "/proc/qtool-run"])
    assert left.value.code == 2
    assert "cannot write to /proc/qtool-run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["head at random", "labels the model does not have", "weights cut off", "hub id while offline"]
)
def test_a_bad_input_in_a_process_of_its_own(name, places, tmp_path):
    arguments, says = next((case[1], case[2]) for case in CASES if case[0] == name)
    done = qtool(*arguments.format(**places).split(), cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
