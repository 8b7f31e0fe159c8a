"""The price list: what a good file means, whom it matches, and one line for every bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from qtool import cli, cost, prices
from qtool.core import QtoolError
from tests.run_folder import Made, write_run

CPU = {"hash": "aa11", "cpu_model": "AMD EPYC 7R13 Processor", "logical_cpus": 4, "gpus": []}
BOTH = CPU | {"hash": "bb22", "gpus": [{"name": "NVIDIA L4"}]}
PRICE = """
- instance: small
  price_per_hour: 0.36
  currency: USD
  date: 2026-01-19
  source: a list
  match: {cpu: EPYC 7R13, logical_cpus: 4}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "prices.yaml"
    path.write_text(text)
    return path


def of(folder: Path, *matches: str, **changed: str) -> prices.PriceList:
    """A list of instances named a, b, c with these matches."""
    entries = [
        f"- {{instance: {name}, price_per_hour: 1, currency: USD, date: 2026-01-19, source: s, match: {match}}}"
        for name, match in zip("abc", matches, strict=False)
    ]
    return prices.read(write(folder, "prices:\n" + "\n".join(entries)))


def test_a_million_inferences_cost_what_they_do():
    # 0.36 an hour is 0.0001 a second; half of 100 requests a second share it
    assert cost.per_million(0.36, 0.5 * 100) == pytest.approx(2.0)


def test_a_rate_with_an_interval_gives_a_cost_with_the_interval_turned_round(tmp_path):
    (price,) = prices.read(write(tmp_path, f"prices:{PRICE}")).prices
    rate = {"value": 100.0, "low": 50.0, "high": 200.0}
    found = cost.of_rate(price, None, rate, 0.5)
    assert found == {"value": pytest.approx(2), "low": pytest.approx(1), "high": pytest.approx(4)}
    searched = cost.of_rate(price, None, {"value": 100.0, "low": None, "high": None, "reason": "why"}, 0.5)
    assert (searched["low"], searched["high"], searched["reason"]) == (None, None, "why")


def test_the_utilisation_is_stated_or_six_tenths(tmp_path):
    assert prices.read(write(tmp_path, f"prices:{PRICE}")).utilization == 0.6
    assert prices.read(write(tmp_path, f"utilization: 0.8\nprices:{PRICE}")).utilization == 0.8


def test_a_day_in_quotes_is_the_same_day(tmp_path):
    plain, quoted = (
        prices.read(write(tmp_path, f"prices:{PRICE.replace('2026-01-19', day)}")).prices[0].date
        for day in ("2026-01-19", "'2026-01-19'")
    )
    assert plain == quoted


@pytest.mark.parametrize(
    ("matches", "host", "device", "instance"),
    [
        (["{cpu: epyc 7r13}"], CPU, "cpu", "a"),
        (["{cpu: EPYC 7R1}"], CPU, "cpu", None),  # no whole word
        (["{cpu: EPYC 7R13, logical_cpus: 8}"], CPU, "cpu", None),
        (["{cpu: EPYC 7R13}"], BOTH, "cpu", None),  # that instance has no GPU
        (["{cpu: EPYC 7R13}", "{gpu: L4}"], BOTH, "cuda", "b"),
        (["{gpu: L4}"], BOTH, "cpu", "a"),  # its CPU rows pay for the GPU too
        (["{gpu: L4}", "{cpu: EPYC 7R13, device: cpu}"], BOTH, "cpu", "b"),
        (["{gpu: L4}", "{cpu: EPYC 7R13, device: cpu}"], BOTH, "cuda", "a"),
        (["{gpu: L4}", "{host: bb22}"], BOTH, "cuda", "b"),
        (["{gpu: L4}"], BOTH | {"gpus": [{"name": "NVIDIA L40S"}]}, "cuda", None),
        (["{cpu: EPYC}", "{cpu: 7R13}"], CPU, "cpu", None),  # two fit alike
    ],
)
def test_which_price_a_host_has(tmp_path, matches, host, device, instance):
    price, why = of(tmp_path, *matches).find(host, device)
    assert (price.instance if price else None) == instance
    assert (why is None) == (price is not None)


def test_no_match_names_what_was_looked_for_and_two_name_each_other(tmp_path):
    _, why = of(tmp_path, "{gpu: H100}").find(CPU, "cpu")
    assert why == "no price matches AMD EPYC 7R13 Processor, 4 logical CPUs, no GPU, cpu rows, host aa11"
    _, why = of(tmp_path, "{cpu: EPYC}", "{cpu: 7R13}").find(CPU, "cpu")
    assert why is not None
    assert "several prices match" in why
    assert "a, b" in why


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "price_per_hour: 0.36",
            "price_per_hour: -1",
            "prices.0: price_per_hour: Input should be greater than 0",
        ),
        ("price_per_hour: 0.36", "price_per_hour: 0", "greater than 0"),
        ("price_per_hour: 0.36", "price_per_hour: .inf", "price_per_hour"),
        ("price_per_hour: 0.36", "price_per_hour: .nan", "price_per_hour"),
        (
            "price_per_hour: 0.36",
            "price_per_hour: 0.36 USD",
            "price_per_hour: Input should be a valid number",
        ),
        ("price_per_hour: 0.36", "price_per_hour: true", "price_per_hour: Input should be a valid number"),
        (
            "price_per_hour",
            "price_per_hours",
            "unknown key 'price_per_hours'. Did you mean 'price_per_hour'?",
        ),
        ("  date: 2026-01-19\n", "", "prices.0: key 'date' is missing"),
        (
            "date: 2026-01-19",
            "date: 2999-01-19",
            "the day on which the price was read is expected, not one to come",
        ),
        ("date: 2026-01-19", "date: last week", "a day such as 2026-01-31 is expected, found 'last week'"),
        ("date: 2026-01-19", "date: 2026", "a day such as 2026-01-31 is expected, found 2026"),
        ("date: 2026-01-19", "date: 2026-13-45", "is not valid YAML"),
        ("  source: a list\n", "", "prices.0: key 'source' is missing"),
        ("currency: USD", "currency: dollars", "prices.0: currency"),
        ("logical_cpus: 4", "logical_cpus: 4.5", "prices.0.match: logical_cpus"),
        ("logical_cpus: 4", "cores: 4", "prices.0.match: unknown key 'cores'"),
        (
            "{cpu: EPYC 7R13, logical_cpus: 4}",
            "{logical_cpus: 4}",
            "it names no host: give 'cpu', 'gpu' or 'host'",
        ),
        ("{cpu: EPYC 7R13, logical_cpus: 4}", "{cpu: ''}", "prices.0.match: cpu"),
        ("{cpu: EPYC 7R13, logical_cpus: 4}", "{cpu: x, device: tpu}", "prices.0.match: device"),
        ("instance: small", "instance: small\n  instance: big", "stands twice"),
    ],
)
def test_a_bad_price_is_one_line_that_names_it(tmp_path, old, new, told):
    assert old in PRICE
    path = write(tmp_path, f"prices:{PRICE.replace(old, new)}")
    with pytest.raises(QtoolError) as caught:
        prices.read(path)
    assert str(path) in str(caught.value)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected 'prices:' with a list"),
        ("- a\n- b", "expected 'prices:' with a list"),
        ("utilization: 0.6", "key 'prices' is missing"),
        ("prices: []", "prices"),
        ("prices: 3", "prices"),
        (f"utilization: 60%\nprices:{PRICE}", "utilization: Input should be a valid number"),
        (f"utilization: 60\nprices:{PRICE}", "utilization: Input should be less than or equal to 1"),
        (f"utilization: 0\nprices:{PRICE}", "utilization: Input should be greater than 0"),
        (f"utilisation: 0.6\nprices:{PRICE}", "unknown key 'utilisation'. Did you mean 'utilization'?"),
        (f"prices:{PRICE}{PRICE}", "instance 'small' stands twice"),
        (f"prices:{PRICE}{PRICE.replace('small', 'big').replace('USD', 'EUR')}", "prices are in EUR and USD"),
        ("prices: *all", "is not valid YAML"),
        ("prices: !!python/object/apply:os.system [ls]", "is not valid YAML"),
        ("prices: [", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, text, told):
    with pytest.raises(QtoolError) as caught:
        prices.read(write(tmp_path, text))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_and_one_that_is_no_text(tmp_path):
    with pytest.raises(QtoolError, match="cannot read the price list"):
        prices.read(tmp_path / "none.yaml")
    (tmp_path / "prices.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QtoolError, match="not text in UTF-8"):
        prices.read(tmp_path / "prices.yaml")


def test_a_bad_price_list_ends_either_verb_with_exit_code_two(tmp_path, capsys):
    run = write_run(tmp_path / "run", {"fp32": Made((0.01,) * 3)}, metric=None)
    path = write(tmp_path, "prices: []")
    for verb in ("report", "pick"):
        with pytest.raises(SystemExit) as caught:
            cli.main([verb, str(run), "--cost", str(path)])
        assert caught.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_example_is_a_price_list():
    found = prices.read(Path(__file__).parents[1] / "docs" / "prices.yaml")
    price, _ = found.find(
        {"cpu_model": "AMD EPYC 7R13 Processor", "gpus": [{"name": "NVIDIA L4"}], "logical_cpus": 4}, "cuda"
    )
    assert price is not None
    assert price.instance == "g6.xlarge"
    assert all(each.source.startswith("https://") for each in found.prices)
