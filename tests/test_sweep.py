"""The sweep from command line to run folder, with the stages in this process so that it is quick."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from qtool import cli, core, isolate, measure, prepare, worker
from qtool import sweep as sweeping
from qtool.core import QtoolError, Unavailable
from qtool.report import plots
from tests.conftest import WORDS, lines_of, make_checkpoint, need

BASE = ("--task", "text", "--text", "text", "--label", "label", "--rounds", "2", "--threads", "1")
THREE = tuple(
    [
        "--recipe",
        "bf16",
        "--recipe",
        "int8-dynamic",
        "--batch-size",
        "1",
        "--batch-size",
        "4",
        "--limit",
        "20",
    ]
)
FILES = {
    "run.json",
    "results.jsonl",
    "summary.json",
    "report.md",
    "report.html",
    "texts.json",
    "frontier.svg",
    "frontier.png",
    "predictions",
}


def make_quick(patch, checkpoint, table, folder):
    """A function (flags) -> (exit code, run folder) that sweeps the tiny model with few calls, in this process."""
    need("evaluate", "sklearn", "accelerate")
    patch.setattr(measure, "CALLS", 6)
    patch.setattr(measure, "MIN_TIME_S", 0.0)
    patch.setattr(measure, "E2E_CALLS", 6)
    patch.setattr(measure, "WARM_UP_MAX_S", 0.05)
    patch.setattr(isolate, "run", run_here)
    patch.setattr(sweeping, "AT_ONCE", 1)  # the libraries' lazy imports are not made for two threads

    def sweep(*flags: str, out: str = "run", base: tuple[str, ...] = BASE) -> tuple[int, Path]:
        arguments = [
            "sweep",
            str(checkpoint),
            "--out",
            str(folder / out),
            "--data",
            str(table),
            *base,
            *flags,
        ]
        return cli.run(arguments), folder / out

    return sweep


@pytest.fixture
def quick(monkeypatch, checkpoint, table, tmp_path):
    monkeypatch.setattr(
        plots, "draw", lambda summary, run_dir: None
    )  # two seconds a run, and drawn in `swept`
    return make_quick(monkeypatch, checkpoint, table, tmp_path)


@pytest.fixture(scope="module")
def swept(checkpoint, table, tmp_path_factory):
    """One finished run of three recipes at two batch sizes, to look at: (exit code, run folder)."""
    folder = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QTOOL_CACHE", str(tmp_path_factory.getbasetemp() / "qtool-cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        sweep = make_quick(patch, checkpoint, table, folder)
        return sweep(*THREE)


@pytest.fixture
def cut(swept, tmp_path, quick):
    """A copy of the finished run to break, and the function that resumes it."""
    run = Path(shutil.copytree(swept[1], tmp_path / "run"))
    return run, lambda *more: quick(*THREE, "--resume", *more)[0]


def run_here(stage, spec, **how):
    """A stage without its process, with the same mapping of errors."""
    try:
        answer = worker.STAGES[stage](json.loads(json.dumps(spec)))
        return isolate.Outcome("ok", json.loads(json.dumps(answer, allow_nan=False)))
    except QtoolError as error:
        return isolate.Outcome("user_error", {}, str(error))
    except Unavailable as error:
        return isolate.Outcome("unavailable", {}, str(error))
    except Exception as error:  # noqa: BLE001 (as the worker does)
        return isolate.Outcome("failed", {}, f"{type(error).__name__}: {error}")


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def row_of(run, recipe, batch_size=1):
    return next(r for r in summary_of(run)["rows"] if (r["recipe"], r["batch_size"]) == (recipe, batch_size))


def test_a_sweep_leaves_the_whole_run_folder_and_exit_code_0(swept):
    code, run = swept
    assert code == 0
    assert {path.name for path in run.iterdir()} >= FILES
    summary = summary_of(run)
    assert (summary["schema"], summary["task"], summary["metric"], summary["baseline"]) == (
        1,
        "text",
        "accuracy",
        "fp32",
    )
    assert {(row["recipe"], row["status"]) for row in summary["rows"]} == {
        ("fp32", "ok"),
        ("bf16", "ok"),
        ("int8-dynamic", "ok"),
    }
    assert summary["frontier"][0]["recommended"] in ("fp32", "bf16", "int8-dynamic")


def test_an_ok_row_carries_every_metric_and_a_missing_value_says_why(swept):
    metrics = row_of(swept[1], "fp32")["metrics"]
    assert set(metrics) == set(core.METRICS) - (set(core.SCORES) - {"accuracy"})
    for name, cell in metrics.items():
        assert {"value", "low", "high"} <= set(cell), name
        assert cell["value"] is not None or cell["reason"], name
    assert metrics["score_delta"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert metrics["speedup"]["value"] == 1.0
    assert metrics["latency_p95_s"]["value"] is None  # 6 calls do not support a p95
    assert metrics["disk_bytes"]["value"] == metrics["disk_bytes"]["low"] > 0


def test_the_accuracy_is_what_a_plain_loop_over_the_model_gives(swept, checkpoint, table):
    import csv

    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    scored = np.load(swept[1] / "predictions" / "fp32-cpu.npz")["ids"].tolist()
    right = 0
    for row in scored:
        with torch.no_grad():
            logits = model(**tokenizer(rows[row]["text"], return_tensors="pt")).logits
        right += model.config.id2label[int(logits.argmax())] == rows[row]["label"]
    assert row_of(swept[1], "fp32")["metrics"]["accuracy"]["value"] == right / len(scored)


def test_predictions_stand_in_file_order_with_the_same_rows_for_every_recipe(swept):
    a, b = (np.load(swept[1] / "predictions" / f"{name}-cpu.npz") for name in ("fp32", "bf16"))
    assert a["ids"].tolist() == sorted(a["ids"].tolist())
    assert len(a["ids"]) == 20
    assert a["ids"].tolist() == b["ids"].tolist()
    assert a["ids"].tolist() != list(range(20))  # a seeded choice, not the head of the file
    assert a["labels"].tolist() == (a["ids"] % 2).tolist()  # the table alternates its labels


def test_the_texts_of_a_run_stand_beside_their_predictions(swept, table):
    import csv

    with table.open() as file:
        rows = list(csv.DictReader(file))
    ids = np.load(swept[1] / "predictions" / "fp32-cpu.npz")["ids"]
    kept = json.loads((swept[1] / "texts.json").read_text("utf-8"))
    assert kept == {"texts": [rows[row]["text"] for row in ids], "pairs": None}


def test_a_tracking_server_that_is_down_costs_the_log_not_the_run(quick, monkeypatch, capsys):
    def down(run_dir):
        raise QtoolError("MLflow does not answer.")

    monkeypatch.setattr(sweeping.track, "check", lambda: None)
    monkeypatch.setattr(sweeping.track, "log", down)
    code, run = quick("--recipe", "bf16", "--rounds", "1", "--track", "mlflow")
    assert code == 2
    assert summary_of(run)["rows"][0]["status"] == "ok"
    assert f"MLflow does not answer. Then: qtool report {run} --track mlflow" in capsys.readouterr().err


def test_the_audit_proves_the_precision(swept):
    assert row_of(swept[1], "bf16")["audit"]["linear_elements_by_dtype"].keys() == {"bfloat16"}
    # 2 layers of 6 linear layers, the pooler and the classifier
    assert row_of(swept[1], "int8-dynamic")["audit"]["changed_modules"] == {"DynamicQuantizedLinear": 14}


def test_each_batch_size_is_a_row_with_a_frontier_of_its_own(swept):
    run = swept[1]
    assert [(f["device"], f["batch_size"]) for f in summary_of(run)["frontier"]] == [("cpu", 1), ("cpu", 4)]
    lines = [
        line
        for line in lines_of(run)
        if (line["stage"], line["recipe"], line["batch_size"]) == ("measure", "fp32", 4)
    ]
    assert len(lines) == 2  # one a round
    # 20 texts make 5 full batches of 4, and a pass is repeated until 6 calls are reached
    assert [len(line["samples"]["latency_s"]) for line in lines] == [10, 10]


def test_every_stage_of_a_shared_artifact_runs_once(swept):
    stages = [(line["recipe"], line["stage"]) for line in lines_of(swept[1])]
    for recipe in ("fp32", "bf16", "int8-dynamic"):
        assert stages.count((recipe, "build")) == stages.count((recipe, "score")) == 1
        assert stages.count((recipe, "measure")) == 4


def test_an_artifact_that_is_not_what_its_recipe_says_fails_and_the_sweep_goes_on(quick, tmp_path):
    recipe = {"name": "liar", "description": "d", "source": "s", "method": "torch_cast", "runtime": "pytorch",
              "expect": {"weight_share": {"int8": 0.9}}}  # fmt: skip
    (tmp_path / "liar.yaml").write_text(yaml.safe_dump(recipe))
    code, run = quick("--recipe", str(tmp_path / "liar.yaml"), "--recipe", "bf16")
    assert code == 3
    assert row_of(run, "liar")["status"] == "failed"
    assert "0.0% of the weight bytes are int8, expected at least 90.0%" in row_of(run, "liar")["cause"]
    assert row_of(run, "bf16")["status"] == "ok"
    assert "liar" in (run / "report.md").read_text()


def test_what_one_recipe_expects_is_no_verdict_on_another_of_the_same_content(quick, tmp_path):
    recipe = {"name": "strict", "description": "d", "source": "s", "method": "torch_cast", "runtime": "pytorch",
              "expect": {"weight_share": {"int8": 0.9}}}  # fmt: skip
    (tmp_path / "strict.yaml").write_text(yaml.safe_dump(recipe))
    twin = recipe | {"name": "twin", "expect": {}}
    (tmp_path / "twin.yaml").write_text(yaml.safe_dump(twin))
    code, run = quick("--recipe", str(tmp_path / "strict.yaml"), "--recipe", str(tmp_path / "twin.yaml"))
    assert code == 3
    status = {row["recipe"]: row["status"] for row in summary_of(run)["rows"]}
    assert status == {"fp32": "ok", "strict": "failed", "twin": "ok"}
    built = {line["recipe"]: line["values"]["artifact"] for line in lines_of(run) if line["stage"] == "build"}
    assert built["fp32"] == built["strict"] == built["twin"]


def test_a_recipe_that_cannot_run_is_skipped_with_its_reason_and_exit_code_0(quick, monkeypatch):
    from qtool import host

    real = host.installed
    monkeypatch.setattr(host, "installed", lambda package: None if package == "nncf" else real(package))
    code, run = quick("--recipe", "openvino-int8")
    assert code == 0
    row = row_of(run, "openvino-int8")
    assert (row["status"], row["cause"], row["next_step"]) == (
        "skipped",
        "needs nncf",
        "pip install 'qtool[openvino]'",
    )


def test_an_architecture_that_a_method_refuses_is_skipped_though_its_artifact_is_cached(quick, monkeypatch):
    from qtool.methods import _architectures

    monkeypatch.setitem(_architectures.NO_COMPILE, "bert", "for this test")
    code, run = quick("--recipe", "fp32-compile")
    row = row_of(run, "fp32-compile")
    assert (code, row["status"]) == (0, "skipped")
    assert (row["cause"], row["next_step"]) == (
        "bert cannot be compiled, for this test",
        "use a recipe without compile",
    )


def test_a_table_without_calibration_rows_skips_static_recipes(quick):
    need("openvino", "nncf")
    code, run = quick("--recipe", "openvino-int8")
    assert code == 0
    assert row_of(run, "openvino-int8")["next_step"] == "give --calibration PATH"


def test_a_run_without_scores_leaves_nothing_that_spoils_a_later_one_with_them(quick):
    quick("--recipe", "bf16", "--no-score", out="unscored")
    code, run = quick("--recipe", "bf16", out="scored")
    assert code == 0
    scores = [line["values"]["metrics"]["accuracy"] for line in lines_of(run) if line["stage"] == "score"]
    assert len(scores) == 2
    assert None not in scores


def test_without_scoring_there_is_no_score_and_no_task(quick):
    code, run = quick("--recipe", "bf16", "--no-score", base=("--text", "text", "--rounds", "1"))
    assert code == 0
    assert summary_of(run)["task"] is None
    assert row_of(run, "bf16")["metrics"]["score_delta"]["value"] is None
    assert not list((run).glob("predictions/*"))


def test_a_dry_run_prints_the_plan_and_writes_nothing(quick, capsys, monkeypatch):
    code, run = quick("--dry-run", "--recipe", "bf16")
    printed = capsys.readouterr().out
    assert code == 0
    assert not run.exists()
    assert "bf16" in printed
    assert "estimate about" in printed


def test_resuming_a_whole_run_repeats_nothing(cut):
    run, resume = cut
    before = (run / "results.jsonl").read_bytes()
    assert resume() == 0
    assert (run / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize("kept", [0, 5, 11])
def test_a_cut_run_is_finished_and_its_whole_lines_stay(cut, kept):
    run, resume = cut
    whole = lines_of(run)
    text = (run / "results.jsonl").read_text().splitlines(keepends=True)
    (run / "results.jsonl").write_text("".join(text[:kept]) + text[kept][:40])
    predictions = {path.name: np.load(path)["logits"] for path in (run / "predictions").iterdir()}
    assert resume() == 0
    assert (run / "results.jsonl").read_text().startswith("".join(text[:kept]))

    def key(line):
        return (
            line["recipe"],
            line["stage"],
            line["batch_size"] or 0,
            line["round"] or 0,
            line["status"],
        )

    assert sorted(map(key, lines_of(run))) == sorted(map(key, whole))
    for name, logits in predictions.items():
        assert np.array_equal(np.load(run / "predictions" / name)["logits"], logits)


def test_a_recipe_with_other_runtime_options_has_its_own_artifact(quick, tmp_path):
    recipe = {"name": "cast", "description": "d", "source": "s", "method": "torch_cast", "runtime": "pytorch",
              "runtime_options": {"autocast": "bfloat16"}, "expect": {"autocast": "bfloat16"}}  # fmt: skip
    (tmp_path / "cast.yaml").write_text(yaml.safe_dump(recipe))
    code, run = quick("--recipe", str(tmp_path / "cast.yaml"))
    assert (code, row_of(run, "cast")["status"]) == (0, "ok")


def test_a_broken_overhead_measurement_does_not_cost_the_baseline(quick, monkeypatch):
    def dying(stage, spec, **how):
        return isolate.Outcome("failed", {}, "x") if stage == "harness" else run_here(stage, spec, **how)

    monkeypatch.setattr(isolate, "run", dying)
    _, run = quick("--recipe", "fp32")
    assert row_of(run, "fp32")["status"] == "ok"


def test_a_gpu_that_runs_out_of_memory_ends_one_trial_with_a_next_step_and_the_sweep_goes_on(
    quick, monkeypatch
):
    def full(stage, spec, **how):
        if stage == "measure" and (spec["recipe"]["name"], spec["batch_size"]) == ("bf16", 4):
            return isolate.Outcome(**worker._oom("OutOfMemoryError: CUDA out of memory.", "cuda"))
        return run_here(stage, spec, **how)

    monkeypatch.setattr(isolate, "run", full)
    code, run = quick("--recipe", "bf16", "--batch-size", "1", "--batch-size", "4")
    assert code == 3
    row = row_of(run, "bf16", 4)
    assert (row["status"], row["cause"]) == ("oom", "OutOfMemoryError: CUDA out of memory.")
    assert "a smaller batch" in row["next_step"]
    assert row_of(run, "bf16")["status"] == row_of(run, "fp32", 4)["status"] == "ok"


def test_a_failed_measurement_is_repeated_by_resume(quick, monkeypatch):
    def dying(stage, spec, **how):
        if stage == "measure" and spec["recipe"]["name"] == "bf16":
            return isolate.Outcome("failed", {}, "killed by SIGKILL", "then --resume")
        return run_here(stage, spec, **how)

    monkeypatch.setattr(isolate, "run", dying)
    code, run = quick("--recipe", "bf16")
    assert code == 3
    assert (row_of(run, "bf16")["status"], row_of(run, "bf16")["cause"]) == ("failed", "killed by SIGKILL")
    monkeypatch.setattr(isolate, "run", run_here)
    code, _ = quick("--recipe", "bf16", "--resume")
    assert code == 0
    assert row_of(run, "bf16")["status"] == "ok"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--rounds", "3"), "argument rounds was 2, now 3"),
        (("--limit", "10"), "argument limit was 20, now 10"),
        (("--batch-size", "2"), "argument batch_sizes was [1, 4], now [1, 4, 2]"),
        (("--recipe", "fp32"), "argument patterns was"),
    ],
)
def test_resume_refuses_a_changed_argument(cut, flags, says):
    _, resume = cut
    with pytest.raises(QtoolError) as caught:
        resume(*flags)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("what", "key"),
    [("host", "cpu_model"), ("versions", "torch"), ("data", "data_hash"), ("model_info", "content")],
)
def test_resume_refuses_another_host_library_or_content(cut, what, key):
    run, resume = cut
    record = json.loads((run / "run.json").read_text())
    record[what][key] = "something else"
    if what == "host":
        record["host"]["hash"] = "0"
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(QtoolError, match=key):
        resume()


def test_an_interrupted_sweep_keeps_what_finished_and_exits_130(quick, monkeypatch):
    def interrupted(stage, spec, **how):
        if stage == "measure" and spec["recipe"]["name"] == "bf16":
            raise KeyboardInterrupt
        return run_here(stage, spec, **how)

    monkeypatch.setattr(isolate, "run", interrupted)
    code, run = quick("--recipe", "bf16")
    assert code == 130
    assert (run / "report.md").is_file()
    assert {line["stage"] for line in lines_of(run)} >= {"build", "score"}


def test_a_damaged_artifact_in_the_cache_is_built_again(cut, quick):
    run, _ = cut
    artifact = next(
        line["values"]["artifact"]
        for line in lines_of(run)
        if (line["recipe"], line["stage"]) == ("bf16", "build")
    )
    path = core.cache_dir() / "artifacts" / artifact / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + b"\0" * 8)
    code, again = quick("--recipe", "bf16", out="again")
    build = next(line for line in lines_of(again) if (line["recipe"], line["stage"]) == ("bf16", "build"))
    assert (code, build["values"]["cached"]) == (0, False)


def test_resume_builds_again_what_was_damaged(cut):
    run, resume = cut
    lines = (run / "results.jsonl").read_bytes().splitlines(keepends=True)
    measured = [n for n, line in enumerate(lines) if b'"measure"' in line and b'"bf16"' in line]
    (run / "results.jsonl").write_bytes(b"".join(line for n, line in enumerate(lines) if n != measured[0]))
    build = next(line for line in lines_of(run) if (line["recipe"], line["stage"]) == ("bf16", "build"))
    (core.cache_dir() / "artifacts" / build["values"]["artifact"] / "check.npz").unlink()
    assert resume() == 0


def test_a_fixed_length_pads_and_cuts_every_timed_text(quick):
    _, run = quick("--recipe", "fp32", "--seq-len", "6")
    data = json.loads((run / "run.json").read_text())["data"]
    assert data["longest"] == 6
    assert data["truncated"] > 0
    rows = [{"input_ids": np.ones((1, n), np.int64)} for n in (2, 6)]
    meta = {"pad": {"input_ids": 0}, "padding_side": "right", "seq_len": 6}
    assert [b["input_ids"].shape for b in measure.timed_batches(rows, meta, 1)] == [(1, 6), (1, 6)]


def test_padding_goes_to_the_tokenizers_side():
    rows = [{"input_ids": np.array([[7, 8]])}, {"input_ids": np.array([[9]])}]
    right = prepare.collate(rows, {"pad": {"input_ids": 1}, "padding_side": "right"})
    left = prepare.collate(rows, {"pad": {"input_ids": 1}, "padding_side": "left"})
    assert right["input_ids"].tolist() == [[7, 8], [9, 1]]
    assert left["input_ids"].tolist() == [[7, 8], [1, 9]]


def test_timed_batches_are_full_consecutive_and_repeat_a_short_table():
    rows = [{"input_ids": np.full((1, 1), n)} for n in range(5)]
    meta = {"pad": {}, "padding_side": "right", "seq_len": None}
    assert [b["input_ids"][:, 0].tolist() for b in measure.timed_batches(rows, meta, 2)] == [[0, 1], [2, 3]]
    assert [b["input_ids"][:, 0].tolist() for b in measure.timed_batches(rows, meta, 7)] == [
        [0, 1, 2, 3, 4, 0, 1]
    ]


@pytest.mark.parametrize("size", [1, 5, 32])
def test_the_score_does_not_depend_on_the_batch_size(checkpoint, table, tmp_path, size):
    need("accelerate")
    from qtool.core import Recipe
    from qtool.runtimes import pytorch

    spec = {"model": str(checkpoint), "revision": None, "task": "text", "data": str(table), "text": "text", "label": "label",
            "score": True, "seed": 0, "limit": None, "seq_len": None, "calibration_rows": 0, "data_out": str(tmp_path / "d")}  # fmt: skip
    worker.probe(spec)
    rows, _ = prepare.load_ragged(tmp_path / "d" / "inputs.npz")
    meta = json.loads((tmp_path / "d" / "meta.json").read_text())
    recipe = Recipe(name="r", description="d", source="s", method="torch_cast", runtime="pytorch")
    loaded = pytorch.wrap(pytorch.open_model(checkpoint, recipe, "cpu"), recipe, "cpu", 1)
    one_by_one = np.concatenate([loaded.predict(row) for row in rows])
    assert np.allclose(worker.evaluate(loaded, rows, meta, size), one_by_one, atol=1e-5)


def test_a_permuted_checkpoint_scores_the_same(swept, quick, checkpoint, table, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = swept[1]
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    model.classifier.weight.data = model.classifier.weight.data.flip(0)
    model.classifier.bias.data = model.classifier.bias.data.flip(0)
    model.config.id2label, model.config.label2id = (
        {0: "POSITIVE", 1: "NEGATIVE"},
        {"POSITIVE": 0, "NEGATIVE": 1},
    )
    model.save_pretrained(tmp_path / "permuted")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "permuted")
    arguments = [
        "sweep",
        str(tmp_path / "permuted"),
        "--out",
        str(tmp_path / "p"),
        "--data",
        str(table),
        *BASE,
        "--recipe",
        "fp32",
        "--limit",
        "20",
    ]
    assert cli.run(arguments) == 0
    assert row_of(tmp_path / "p", "fp32")["metrics"]["accuracy"] == row_of(run, "fp32")["metrics"]["accuracy"]


def test_three_permuted_classes_score_the_same_by_name_and_are_suspected_without_names(
    quick, tmp_path, capsys
):
    """The original's own answers are the labels, so it is always right and any other order is mostly wrong."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    meanings, order = ("entailment", "neutral", "contradiction"), [2, 0, 1]
    folder = make_checkpoint(tmp_path / "original", labels=meanings)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [
        (" ".join(WORDS[(i * 5 + k * 3) % len(WORDS)] for k in range(4)), WORDS[i % len(WORDS)])
        for i in range(60)
    ]
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(*pair, return_tensors="pt")).logits for pair in pairs])
        model.classifier.bias -= logits.median(dim=0).values  # so that every class is answered
        said = (logits - logits.median(dim=0).values).argmax(1).tolist()
    assert len(set(said)) == 3
    model.save_pretrained(folder)
    model.classifier.weight.data, model.classifier.bias.data = (
        model.classifier.weight.data[order],
        model.classifier.bias.data[order],
    )
    for name, labels in (
        ("named", [meanings[i] for i in order]),
        ("nameless", [f"LABEL_{i}" for i in range(3)]),
    ):
        model.config.id2label = dict(enumerate(labels))
        model.config.label2id = {label: i for i, label in enumerate(labels)}
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    rows = [f"{a}\t{b}\t{meanings[label]}" for (a, b), label in zip(pairs, said, strict=True)]
    data = tmp_path / "dev_matched.tsv"
    data.write_text("\n".join(["sentence1\tsentence2\tgold_label", *rows]) + "\n")
    scores = {}
    for name in ("original", "named", "nameless"):
        out = tmp_path / f"run-{name}"
        arguments = ["sweep", str(tmp_path / name), "--task", "mnli", "--data", str(data), "--out", str(out)]
        assert cli.run([*arguments, "--recipe", "fp32", "--rounds", "1", "--threads", "1"]) == 0
        scores[name] = row_of(out, "fp32")["metrics"]["accuracy"]["value"]
        printed = capsys.readouterr().out
        assert ("the labels look permuted" in printed) == (name == "nameless")
        assert ("the labels look permuted" in (out / "report.md").read_text()) == (name == "nameless")
    assert scores["original"] == scores["named"] == 1.0
    assert scores["nameless"] < 0.5


def test_auto_rounds_measure_again_only_what_is_uncertain_and_its_baseline(quick, monkeypatch):
    wide = iter(["bf16", None])

    def unsettled(found, within):
        name = next(wide)
        assert within == 0.05
        return [trial for trial in found.trials if trial.recipe == name]

    monkeypatch.setattr(sweeping.evidence, "unsettled", unsettled)
    flags = ("--recipe", "bf16", "--recipe", "int8-dynamic", "--rounds", "auto", "--speedup-within", "5%")
    code, run = quick(*flags, "--limit", "8")
    rounds = {
        recipe: [m["round"] for m in lines_of(run) if m["stage"] == "measure" and m["recipe"] == recipe]
        for recipe in ("fp32", "bf16", "int8-dynamic")
    }
    assert code == 0
    assert rounds == {"fp32": [1, 2, 3, 4, 5, 6], "bf16": [1, 2, 3, 4, 5, 6], "int8-dynamic": [1, 2, 3, 4, 5]}


def test_auto_rounds_end_with_the_time_budget(quick, monkeypatch, capsys):
    monkeypatch.setattr(sweeping.evidence, "unsettled", lambda found, within: list(found.trials)[1:])
    code, run = quick("--recipe", "bf16", "--rounds", "auto", "--time-budget", "0.001s", "--limit", "8")
    assert code == 0
    assert "the time budget is over; still wider than 10 %: bf16" in capsys.readouterr().err
    assert max(m["round"] or 0 for m in lines_of(run)) == 5


def test_a_policy_takes_five_rounds_and_its_verdict_is_the_exit_code(quick, tmp_path, capsys):
    policy = tmp_path / "qtool.yaml"
    for limit, expected in (("100GB", 0), ("1KB", 1)):
        policy.write_text(f"all: {{max_disk: {limit}}}")
        flags = ("--recipe", "bf16", "--policy", str(policy), "--limit", "8")
        code, run = quick(
            *flags, out=limit, base=tuple(word for word in BASE if word not in ("--rounds", "2"))
        )
        assert code == expected
        assert "gate:" in capsys.readouterr().out
        assert (run / "gate.xml").is_file()
        assert max(m["round"] or 0 for m in lines_of(run)) == 5


def test_a_policy_decides_what_a_failed_recipe_means(quick, tmp_path, monkeypatch):
    policy = tmp_path / "qtool.yaml"
    real = isolate.run

    def broken(stage, spec, **more):
        if stage == "measure" and spec["recipe"]["name"] == "bf16":
            return isolate.Outcome("failed", {}, "it broke", None)
        return real(stage, spec, **more)

    monkeypatch.setattr(isolate, "run", broken)
    flags = (
        "--recipe",
        "bf16",
        "--recipe",
        "int8-dynamic",
        "--policy",
        str(policy),
        "--limit",
        "8",
        "--rounds",
        "1",
    )
    for number, (text, expected) in enumerate(
        [
            ("all: {max_disk: 1GB}", 1),
            ("{all: {max_disk: 1GB}, expected_failures: {bf16: known}}", 0),
            ("recipes: {int8-dynamic: {max_disk: 1GB}}", 3),
        ]
    ):
        policy.write_text(text)
        assert quick(*flags, out=f"run-{number}")[0] == expected
