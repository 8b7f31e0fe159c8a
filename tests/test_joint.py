"""Runs of several hosts in one sheet: costs and rates counted by hand, what is refused, what is called out."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from qtool import cli, cost, host, joint, pick, prices
from qtool.core import QtoolError
from qtool.pick import Goals
from qtool.report import choice
from qtool.report import joint as sheet
from qtool.units import rounded
from tests.run_folder import Made, write_run
from tests.test_load import rate_within

EXAMPLE = Path(__file__).parents[1] / "reports" / "example"
LABELS = [0, 1] * 500
BASE = [1 - label if i < 100 else label for i, label in enumerate(LABELS)]
CPU = {"hash": "c" * 16, "cpu_model": "A CPU", "cpu_flags": ["avx2", "avx512_vnni"], "gpus": []}
GPU = {"hash": "d" * 16, "cpu_model": "B CPU", "cpu_flags": ["avx2"], "gpus": [{"name": "NVIDIA L4"}]}
PRICES = """
utilization: 0.5
prices:
- {instance: cpu-box, price_per_hour: 0.36, currency: USD, date: 2026-01-19, source: a list, match: {cpu: A CPU}}
- {instance: gpu-box, price_per_hour: 1.62, currency: USD, date: 2026-01-19, source: a list, match: {gpu: L4}}
"""


def made(ms, changed=(), **more):
    told = [1 - answer if i in changed else answer for i, answer in enumerate(BASE)]
    right = sum(a == b for a, b in zip(told, LABELS, strict=True)) / len(LABELS)
    return Made((ms / 1000,) * 3, told, metrics={"accuracy": right}, **more)


def facts(host_, started="2026-11-30T12:00:00+00:00", **more):
    return {
        "host": host_,
        "started_at": started,
        "model_info": {"content": "m" * 64},
        "data": {"rows": 1000, "data_hash": "d" * 64},
        "args": {"threads": 2, "seq_len": None},
        **more,
    }


def cpu_run(folder, **more):
    """int8 serves 200 texts a second at full use, fp32 100."""
    return write_run(folder, {"fp32": made(10), "int8": made(5)}, labels=LABELS, run=facts(CPU, **more))


def gpu_run(folder, **more):
    """fp16 serves 1,000 one by one and 4,000 in batches of 8."""
    recipes = {
        "fp32@cuda": made(2, device="cuda", values={"peak_vram_bytes": 1e9, "energy_j": 0.05}),
        "fp16@cuda": made(1, device="cuda", values={"peak_vram_bytes": 5e8, "energy_j": 0.02}),
        "fp16@cuda8": made(2, device="cuda", batch_size=8, values={"peak_vram_bytes": 6e8, "energy_j": 0.06}),
    }
    return write_run(folder, recipes, labels=LABELS, run=facts(GPU, **more))


@pytest.fixture
def priced(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(PRICES)
    return prices.read(path)


@pytest.fixture
def two(tmp_path):
    return [cpu_run(tmp_path / "cpu"), gpu_run(tmp_path / "gpu")]


def row(found, recipe, hardware="R1"):
    return next(r for r in found["rows"] if (r["recipe"], r["hardware"]) == (recipe, hardware))


def test_cost_and_break_even_are_those_counted_by_hand(two, priced):
    found = joint.join(two, priced)
    # 0.36 an hour is 0.0001 a second, over half of 200; 1.62 is 0.00045 over half of 4,000
    assert row(found, "int8")["cost_per_million"]["value"] == pytest.approx(1.0)
    assert row(found, "fp32")["cost_per_million"]["value"] == pytest.approx(2.0)
    assert row(found, "fp16", "R2")["cost_per_million"]["value"] == pytest.approx(0.225)
    assert row(found, "fp16", "R2")["served"]["batch_size"] == 8
    (pair,) = found["break_even"]
    # four cpu-boxes cost 1.44 and serve 400/s, five cost 1.80; 1.62 / 0.36 = 4.5 machines of 100/s
    assert pair["break_even_per_s"] == pytest.approx(400)
    assert pair["ratio_per_s"] == pytest.approx(450)
    assert (pair["cpu"]["recipe"], pair["gpu"]["recipe"]) == ("int8", "fp16")
    assert found["sentence"].startswith(
        "Up to 100/s one cpu-box with int8 (1.00 USD per million) is cheapest. Up to 400/s it takes 4 of them."
        " From 400/s on gpu-box with fp16 (0.225 USD per million) is cheaper."
        " Counted in fractions, CPU machines reach the price of one GPU machine at 450/s."
    )
    assert "50 % of its full measured throughput" in found["sentence"]


def test_the_cost_has_the_interval_of_the_throughput_and_none_at_an_sla(tmp_path, priced):
    noisy = Made((0.0049, 0.005, 0.0051), BASE, metrics={"accuracy": 0.9})
    run = write_run(tmp_path / "a", {"fp32": made(10), "int8": noisy}, labels=LABELS, run=facts(CPU))
    entry = row(joint.join([run], priced), "int8")
    rate, cell = entry["served"], entry["cost_per_million"]
    assert cell["low"] == pytest.approx(0.36 / 3600 / (0.5 * rate["high"]) * 1e6)
    assert cell["high"] == pytest.approx(0.36 / 3600 / (0.5 * rate["low"]) * 1e6)
    assert cell["low"] < cell["value"] < cell["high"]
    cell = row(joint.join([run], priced, 0.05), "int8")["cost_per_million"]
    assert (cell["low"], cell["high"]) == (None, None)
    assert "no interval" in cell["reason"]


def test_the_rate_at_an_sla_is_that_of_the_closed_form(tmp_path, priced):
    run = write_run(tmp_path / "a", {"fp32": made(10)}, labels=LABELS, run=facts(CPU))
    found = joint.join([run], priced, 0.04)
    # a request takes 12.5 ms from text to class, every time: Erlang's M/D/1 queue
    expected = rate_within(0.04, 0.0125)
    entry = row(found, "fp32")
    assert entry["served"]["value"] == pytest.approx(expected, rel=0.08)
    assert entry["served"]["basis"] == "sla"
    rate = entry["served"]["value"]
    assert entry["cost_per_million"]["value"] == pytest.approx(0.36 / 3600 / (0.5 * rate) * 1e6)
    assert found["samples"] == "end_to_end_s"


def test_an_sla_that_a_lone_request_breaks_has_no_cost_and_says_so(two, priced):
    found = joint.join(two, priced, 0.009)
    cell = row(found, "fp32")["cost_per_million"]
    assert (cell["value"], cell["reason"]) == (
        None,
        "no rate keeps the SLA: a lone request takes 12.5 ms (p95)",
    )
    assert row(found, "int8")["cost_per_million"]["value"] is not None
    assert "no rate of fp32 on R1 cpu: no rate keeps the SLA" in sheet.render(found)


def test_without_a_gpu_run_it_says_what_a_gpu_would_have_to_serve(tmp_path, priced):
    found = joint.join([cpu_run(tmp_path / "cpu")], priced)
    # 4.5 times the price for each request: 4.5 times 200/s
    assert (
        "gpu-box (1.62 USD an hour, 4.5 times the price) would have to serve more than 900/s"
        in found["sentence"]
    )
    assert found["sentence"].startswith("Up to 100/s one cpu-box with int8 is enough: 1.00 USD per million")
    found = joint.join([gpu_run(tmp_path / "gpu")], priced)
    # 4,000/s x 0.36 / 1.62 = 889/s
    assert (
        "cpu-box (0.36 USD an hour, 0.222 times the price) would have to serve more than 889/s"
        in found["sentence"]
    )


def test_a_recipe_whose_score_is_not_shown_to_hold_is_not_advised(tmp_path, priced):
    recipes = {"fp32": made(10), "int8": made(5, changed=range(900, 1000))}
    run = write_run(tmp_path / "a", recipes, labels=LABELS, run=facts(CPU))
    found = joint.join([run], priced)
    assert not row(found, "int8")["score_shown"]
    assert [c["recipe"] for c in found["candidates"]] == ["fp32"]


def test_without_a_price_list_there_are_rates_and_no_cost(two):
    found = joint.join(two)
    assert row(found, "int8")["served"]["value"] == pytest.approx(200)
    assert row(found, "int8")["cost_per_million"]["value"] is None
    assert "add --cost" in found["sentence"]
    json.dumps(found, allow_nan=False)


def test_a_host_that_no_price_matches_has_no_cost_and_the_reason_names_it(tmp_path, priced):
    run = write_run(
        tmp_path / "a", {"fp32": made(10)}, labels=LABELS, run=facts(CPU | {"cpu_model": "Other"})
    )
    found = joint.join([run], priced)
    assert row(found, "fp32")["cost_per_million"]["reason"].startswith(
        "no price matches Other, no GPU, cpu rows"
    )
    assert "nothing can be advised: no price matches Other" in found["sentence"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model_info": {"content": "n" * 64}}, "not the same model content, mmmmmmmmmmmm and nnnnnnnnnnnn"),
        ({"model_info": {}}, "does not tell the content of its model"),
        ({"task": "sst2"}, "not the same task, demo and sst2"),
        ({"metric": "f1"}, "not the same metric, accuracy and f1"),
        ({"data": {"data_hash": "e" * 64}}, "not the same task data, dddddddddddd and eeeeeeeeeeee"),
        ({"args": {"threads": 2, "seq_len": 128}}, "not the same fixed length, None and 128"),
    ],
)
def test_what_must_not_be_compared_is_refused_in_one_line(tmp_path, changed, told):
    runs = [cpu_run(tmp_path / "a"), cpu_run(tmp_path / "b", **({"started": "2026-12-01"} | changed))]
    with pytest.raises(QtoolError) as caught:
        joint.join(runs)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"versions": {"torch": "2.14.0"}}, "library versions"),
        ({"args": {"threads": 4, "seq_len": None}}, "threads"),
        ({"host": GPU}, "host"),
    ],
)
def test_what_may_differ_is_marked(tmp_path, changed, what):
    runs = [cpu_run(tmp_path / "a"), cpu_run(tmp_path / "b", started="2026-12-01")]
    stored = json.loads((runs[1] / "run.json").read_text())
    (runs[1] / "run.json").write_text(json.dumps(stored | changed))
    found = joint.join(runs)
    assert [told["what"] for told in found["differences"]] == [what]
    assert f"note: not the same {what}: R1" in sheet.render(found)


def test_the_same_run_twice_is_refused_wherever_it_lies(tmp_path):
    run = cpu_run(tmp_path / "a")
    shutil.copytree(run, tmp_path / "b")
    with pytest.raises(QtoolError, match="are the same run"):
        joint.join([run, tmp_path / "b"])


def test_repetitions_stand_side_by_side_and_a_decision_takes_the_later_one(tmp_path, priced):
    first = cpu_run(tmp_path / "a")
    slower = {"fp32": made(12), "int8": made(6)}
    later = write_run(
        tmp_path / "b", slower, labels=LABELS, run=facts(CPU, started="2026-12-01T12:00:00+00:00")
    )
    for runs in ([first, later], [later, first]):
        found = joint.join(runs, priced)
        assert len(found["rows"]) == 4
        (candidate,) = found["candidates"]
        # the slower one: to take the better of two would be to choose by luck
        assert candidate["usable_rate_per_s"] == pytest.approx(0.5 * 1000 / 6)
        assert "are not pooled" in " ".join(found["notes"])
    assert row(joint.join([first, later]), "int8", "R2")["served"]["value"] == pytest.approx(1000 / 6)


def test_a_repetition_that_failed_does_not_take_the_place_of_a_measurement(tmp_path, priced):
    failed = {"measure-1": ("failed", "boom", None)}
    later = write_run(
        tmp_path / "b",
        {"fp32": made(10, bad=failed), "int8": made(5, bad=failed)},
        labels=LABELS,
        run=facts(CPU, started="2026-12-01T12:00:00+00:00"),
    )
    found = joint.join([cpu_run(tmp_path / "a"), later], priced)
    (candidate,) = found["candidates"]
    assert (candidate["hardware"], candidate["recipe"]) == ("R1", "int8")
    # a trial that was scored and not timed has no score to differ in, and the same answers
    assert not any("repeats" in note or "predictions changed" in note for note in found["notes"])
    assert "2 of 2 artifacts scored on several hosts or devices answered alike" in found["notes"]


def test_another_process_on_the_gpu_is_told_as_such_in_both_reports(tmp_path, priced):
    shared = {"peak_vram_bytes": 1e9, "other_processes": True}
    recipes = {"fp32@cuda": made(2, device="cuda", contended=True, values=shared)}
    run = write_run(tmp_path / "gpu", recipes, labels=LABELS, run=facts(GPU))
    assert "other work used the GPU while fp32 was measured on R1" in " ".join(
        joint.join([run], priced)["notes"]
    )
    assert "other work used the GPU while it ran" in choice.render(pick.pick(run, Goals()))


def test_a_run_without_a_trial_is_one_line(tmp_path):
    with pytest.raises(QtoolError, match="planned no trial"):
        joint.join([cpu_run(tmp_path / "a", plan=[])])


def test_a_third_instance_that_costs_less_an_hour_is_named(tmp_path, two):
    small = CPU | {"hash": "f" * 16, "cpu_model": "Small"}
    slow = {"fp32": made(100), "int8": made(50)}
    third = write_run(tmp_path / "small", slow, labels=LABELS, run=facts(small))
    path = tmp_path / "three.yaml"
    last = "- {instance: small, price_per_hour: 0.05, currency: USD, date: 2026-01-19, source: a, match: {cpu: Small}}"
    path.write_text(f"{PRICES}{last}\n")
    sentence = joint.join([*two, third], prices.read(path))["sentence"]
    assert sentence.startswith("Of the CPU and the GPU that cost least per million: Up to 100/s one cpu-box")
    # half of 20 a second at 0.05 an hour; a cpu-box costs 0.36 however little it serves
    assert "Up to 10.0/s one small with int8 costs less an hour than either." in sentence


def test_a_speedup_is_against_the_baseline_of_its_own_run(two):
    found = joint.join(two)
    speedup = row(found, "fp16", "R2")["batches"][0]["metrics"]["speedup"]
    assert speedup["value"] == pytest.approx(2)  # not 10, against the CPU's fp32


def test_an_artifact_that_answers_differently_is_called_out_with_the_instructions(tmp_path):
    # example 0 was wrong and becomes right, 500 and 501 were right and become wrong
    other = {"fp32": made(10), "int8": made(5, changed=(0, 500, 501))}
    flags = CPU | {"hash": "e" * 16, "cpu_flags": ["avx2"]}
    runs = [cpu_run(tmp_path / "a"), write_run(tmp_path / "b", other, labels=LABELS, run=facts(flags))]
    found = joint.join(runs)
    told = next(each for each in found["artifacts"] if each["recipe"] == "int8")
    assert (told["changed"], told["gained"], told["lost"], told["examples"]) == (3, 1, 2, 1000)
    assert told["instructions"] == {"first_only": ["avx512_vnni"], "other_only": []}
    notes = " ".join(found["notes"])
    assert (
        "int8, the same artifact, from R1 (cpu) to R2 (cpu): 3 of 1,000 predictions changed"
        " (1 became right, 2 wrong); only R1 (cpu) has avx512_vnni" in notes
    )
    assert "1 of 2 artifacts scored on several hosts or devices answered alike" in notes


def test_answers_of_a_gpu_are_not_explained_by_the_processors(tmp_path):
    other = {"fp32": made(10), "int8@cuda": made(5, changed=(0,), device="cuda")}
    flags = CPU | {"hash": "e" * 16, "cpu_flags": ["avx2"]}
    runs = [cpu_run(tmp_path / "a"), write_run(tmp_path / "b", other, labels=LABELS, run=facts(flags))]
    found = joint.join(runs)
    told = next(each for each in found["artifacts"] if each["recipe"] == "int8")
    assert told["instructions"] == {"first_only": [], "other_only": []}
    assert (
        "1 of 1,000 predictions changed (1 became right, 0 wrong); the kernels of cpu and cuda"
        in " ".join(found["notes"])
    )


def test_predictions_that_are_missing_are_told_beside_the_scores(tmp_path):
    runs = [cpu_run(tmp_path / "a"), cpu_run(tmp_path / "b", started="2026-12-01")]
    (runs[1] / "predictions" / "int8-cpu.npz").unlink()
    told = next(each for each in joint.join(runs)["artifacts"] if each["recipe"] == "int8")
    assert told["changed"] is None
    assert "cannot be read" in told["changed_reason"]
    notes = " ".join(joint.join(runs)["notes"])
    assert "int8, the same artifact, from R1 (cpu) to R2 (cpu): changed answers not counted" in notes
    assert "1 of 2 artifacts scored on several hosts or devices answered alike" in notes


def test_a_regression_has_no_answers_to_count(tmp_path):
    from tests.run_folder import write_regression

    runs = [write_regression(tmp_path / name, run=facts(each)) for name, each in (("a", CPU), ("b", GPU))]
    told = joint.join(runs)["artifacts"][0]
    assert (told["changed"], told["changed_reason"]) == (None, "a regression has no classes")
    assert told["max_logit_difference"] == 0


def test_a_recipe_that_failed_keeps_its_row_with_the_cause(tmp_path, priced):
    recipes = {"fp32": made(10), "int8": made(5, bad={"measure-1": ("oom", "no memory", None)})}
    run = write_run(tmp_path / "a", recipes, labels=LABELS, run=facts(CPU))
    found = joint.join([run], priced)
    entry = row(found, "int8")
    assert (entry["status"], entry["served"]["reason"]) == ("oom", "oom: no memory")
    assert "no rate of int8 on R1 cpu: oom: no memory" in sheet.render(found)


def cli_out(capsys, *words):
    assert cli.run(list(map(str, words))) == 0
    return capsys.readouterr().out


def test_every_format_tells_the_same_numbers(two, tmp_path, capsys, priced):
    command = ("report", *two, "--cost", tmp_path / "prices.yaml", "--format")
    found = json.loads(cli_out(capsys, *command, "json"))
    assert found == joint.join(two, priced)
    lines = list(csv.DictReader(io.StringIO(cli_out(capsys, *command, "csv"), newline="")))
    texts = {format: cli_out(capsys, *command, format) for format in ("table", "md", "html")}
    seen = 0
    for entry in found["rows"]:
        of_row = [
            line
            for line in lines
            if (line["hardware"], line["recipe"]) == (entry["hardware"], entry["recipe"])
        ]
        cell = entry["cost_per_million"]
        (told,) = (line for line in of_row if line["metric"] == "cost_per_million")
        assert (float(told["value"]), told["unit"]) == (cell["value"], "USD")
        (told,) = (line for line in of_row if line["metric"] == "largest_throughput_per_s")
        assert float(told["value"]) == entry["served"]["value"]
        for text in texts.values():
            assert rounded(cell["value"]) in text
        for batch in entry["batches"]:
            for name, value in batch["metrics"].items():
                (told,) = (
                    line
                    for line in of_row
                    if (line["metric"], line["batch_size"]) == (name, str(batch["batch_size"]))
                )
                assert (float(told["value"]) if told["value"] else None) == value["value"]
                seen += 1
    assert seen == 5 * 6  # five rows, two of one recipe; five metrics and the peak
    for text in texts.values():
        assert "Up to 100/s one cpu-box" in text


def test_formats_of_one_run_are_refused_for_several(two, tmp_path):
    for flags in (["--format", "svg"], ["--format", "card", "--recipe", "int8"], ["--format", "parquet"]):
        with pytest.raises(QtoolError, match="is of one run, not with several runs"):
            cli.run(["report", *map(str, two), *flags])
    for flags in (["--serve"], ["--track", "mlflow"]):
        with pytest.raises(QtoolError, match=f"{flags[0]} is of one run"):
            cli.run(["report", *map(str, two), *flags])
    with pytest.raises(QtoolError, match="not with --cost and --sla"):
        cli.run(["report", str(two[0]), "--cost", str(tmp_path / "p.yaml"), "--format", "png"])
    with pytest.raises(QtoolError, match="--sla: '50': the unit is missing"):
        cli.run(["report", str(two[0]), "--sla", "50"])
    with pytest.raises(QtoolError, match="--sla"):  # as a script gives it whose variable is not set
        cli.run(["report", str(two[0]), "--sla", ""])


def test_hostile_names_are_escaped_and_printable(tmp_path):
    evil = "<img src=x onerror=alert(1)>\x1b[31m|=1+1"
    host_ = CPU | {"cpu_model": evil}
    run = write_run(tmp_path / "a", {"fp32": made(10)}, labels=LABELS, run=facts(host_, model=evil))
    path = tmp_path / "prices.yaml"
    path.write_text(
        PRICES.replace("cpu-box", '"=cmd|<b>\\e[31m"')
        .replace("a list", '"</style><script>\\e"')
        .replace("{cpu: A CPU}", "{host: " + "c" * 16 + "}")
    )
    found = joint.join([run], prices.read(path))
    text, html, markdown = sheet.render(found), sheet.to_html(found), sheet.to_markdown(found)
    assert all("\x1b" not in told for told in (text, html, markdown, sheet.to_csv(found)))
    assert "<img" not in html
    assert "<script" not in html
    assert html.count("</style>") == 1
    assert "<img" not in markdown
    lines = list(csv.DictReader(io.StringIO(sheet.to_csv(found), newline="")))
    assert {line["instance"] for line in lines} == {"'=cmd|<b> [31m"}


def copy_on_another_host(to: Path) -> Path:
    """The committed run as if a processor without 8-bit instructions had made it, with that host's own hash."""
    shutil.copytree(EXAMPLE, to)
    run = json.loads((to / "run.json").read_text())
    old = run["host"].pop("hash")
    run["host"] |= {"cpu_model": "An older CPU", "cpu_flags": ["avx2", "avx512f"]}
    new = host.fingerprint_hash(run["host"])
    run["host"]["hash"] = new
    (to / "run.json").write_text(json.dumps(run))
    lines = (to / "results.jsonl").read_text()
    (to / "results.jsonl").write_text(lines.replace(old, new))
    return to


def test_the_example_and_a_copy_on_another_host_make_one_sheet(tmp_path):
    found = joint.join([EXAMPLE, copy_on_another_host(tmp_path / "copy")])
    assert [side["label"] for side in found["hardware"]] == ["R1", "R2"]
    assert [told["what"] for told in found["differences"]] == ["host"]
    assert len(found["rows"]) == 2 * len(json.loads((EXAMPLE / "run.json").read_text())["plan"])
    assert all(told["changed"] == 0 for told in found["artifacts"])
    assert not any("predictions changed" in note for note in found["notes"])
    for recipe in ("fp32", "int8-dynamic"):
        a, b = (row(found, recipe, label)["batches"][0]["metrics"] for label in ("R1", "R2"))
        assert a == b
    tampered = json.loads((tmp_path / "copy" / "run.json").read_text())
    tampered["model_info"]["content"] = "0" * 64
    (tmp_path / "copy" / "run.json").write_text(json.dumps(tampered))
    with pytest.raises(QtoolError, match="not the same model content, 96d0f34fb741 and 000000000000"):
        joint.join([EXAMPLE, tmp_path / "copy"])


BATCHES = {
    "fp32": made(10),
    "fp32@8": made(80, batch_size=8),
    "int8": made(4),
    "int8@8": made(16, batch_size=8),
}


def test_pick_prefers_the_cheapest_option_within_the_goals(tmp_path, priced):
    run = write_run(tmp_path / "run", BATCHES, labels=LABELS, run=facts(CPU))
    assert pick.pick(run, Goals(prices=priced))["chosen"] == "int8 batch 1"
    found = pick.pick(run, Goals(prices=priced, prefer="cost"))
    assert (found["chosen"], found["decided_by"]) == ("int8 batch 8", "cost")
    # 8 texts in 16 ms are 500/s, half of them 250/s: 0.0001 a second over 250
    costs = {option["name"]: option["cost_per_million"]["value"] for option in found["options"]}
    assert costs["int8 batch 8"] == pytest.approx(0.4)
    assert costs["int8 batch 1"] == pytest.approx(0.8)
    assert pick.pick(run, Goals(prices=priced, prefer="cost", p95_s=0.01))["chosen"] == "int8 batch 1"
    line = next(line for line in found["evidence"] if line["objective"] == "cost")
    assert (line["verdict"], line["ratio"]) == ("better", pytest.approx(0.5))


def test_a_price_moves_neither_the_frontier_nor_the_choice_by_latency(tmp_path, priced):
    run = write_run(tmp_path / "run", BATCHES, labels=LABELS, run=facts(CPU))
    plain, with_cost = pick.pick(run, Goals()), pick.pick(run, Goals(prices=priced))
    assert plain["frontier"] == with_cost["frontier"]
    assert (plain["chosen"], plain["tied"], plain["runner_up"]) == tuple(
        with_cost[key] for key in ("chosen", "tied", "runner_up")
    )
    assert plain["prices"] is None


def test_the_verb_shows_the_cost_of_every_option(tmp_path, capsys, priced):
    run = write_run(tmp_path / "run", BATCHES, labels=LABELS, run=facts(CPU))
    told = cli_out(capsys, "pick", run, "--cost", tmp_path / "prices.yaml", "--prefer", "cost")
    assert told.startswith("take int8 batch 8 (a/model, preferring cost)")
    assert "cost per million in USD, at 50 % of the full measured throughput" in told
    assert told.index("int8 batch 8: 0.400") < told.index("fp32 batch 1: 2.00")
    with pytest.raises(QtoolError, match="--prefer cost needs prices"):
        cli.run(["pick", str(run), "--prefer", "cost"])


def test_to_prefer_cost_where_no_price_matches_says_what_was_looked_for(tmp_path, capsys, priced):
    run = write_run(tmp_path / "run", BATCHES, labels=LABELS, run=facts(CPU | {"cpu_model": "Other"}))
    with pytest.raises(QtoolError, match=r"no option of .* has a cost: no price matches Other"):
        pick.pick(run, Goals(prices=priced, prefer="cost"))
    found = pick.pick(run, Goals(prices=priced))
    assert found["chosen"] == "int8 batch 1"
    assert "no cost of fp32 batch 1, " in choice.render(found)


def test_a_row_of_another_host_of_its_run_has_that_hosts_facts():
    run = {"host": CPU, "hosts": {"l4/" + "d" * 16: GPU}}
    assert cost.host_of(run, {"host": CPU["hash"]}) == CPU
    assert cost.host_of(run, {"host": ""}) == CPU
    assert cost.host_of(run, {}) == CPU
    assert cost.host_of(run, {"host": "l4/" + "d" * 16}) == GPU
    assert cost.host_of(run, {"host": "elsewhere"}) == {"hash": "elsewhere"}


def test_one_folder_of_two_hosts_gives_two_hardware(tmp_path, priced):
    run = gpu_run(tmp_path / "run")
    names = {recipe: f"kind/{facts['hash']}" for recipe, facts in (("fp32", CPU), ("fp16", GPU))}
    record = json.loads((run / "run.json").read_text())
    record["hosts"] = {names["fp32"]: CPU | {"kind": "kind"}, names["fp16"]: GPU | {"kind": "kind"}}
    record["plan"] = [entry | {"host": names[entry["recipe"]]} for entry in record["plan"]]
    (run / "run.json").write_text(json.dumps(record))
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    told = (json.dumps(line | {"host": names[line["recipe"]].partition("/")[2]}) for line in lines)
    (run / "results.jsonl").write_text("".join(f"{line}\n" for line in told))
    found = joint.join([run], priced)
    assert [(side["label"], side["host"]) for side in found["hardware"]] == [
        ("R1", CPU["hash"]),
        ("R2", GPU["hash"]),
    ]
    assert (row(found, "fp32")["instance"], row(found, "fp16", "R2")["instance"]) == ("cpu-box", "gpu-box")
    assert [told["what"] for told in found["differences"]] == ["host"]
