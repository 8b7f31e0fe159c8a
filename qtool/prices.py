"""`prices.yaml`: what an instance costs an hour, by whose word and of which day. Users keep it; nothing is looked up."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from qtool import strict_yaml
from qtool.core import QtoolError, did_you_mean

UTILIZATION = 0.6
"""Share of the rate a machine could carry that it is taken to serve on average, where the file states none."""


class _Strict(BaseModel):
    """A part of the file. A number must be one: a text or a truth value is not taken for it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Match(_Strict):
    """Which hosts of runs are this instance. Every key that is given must fit; `cpu` and `gpu` are whole
    words of names, so that L4 is not L40S.

    Without `gpu` only a host without a GPU fits, unless `host` or `device` says which rows are meant.
    """

    host: str | None = Field(None, min_length=1, description="the fingerprint's hash, as run.json has it")
    cpu: str | None = Field(None, min_length=1)
    gpu: str | None = Field(None, min_length=1)
    logical_cpus: int | None = Field(None, ge=1, strict=True)
    device: Literal["cpu", "cuda"] | None = Field(None, description="prices the rows of this device only")

    @model_validator(mode="after")
    def _something(self) -> Match:
        if not (self.host or self.cpu or self.gpu):
            raise ValueError("it names no host: give 'cpu', 'gpu' or 'host'")
        return self

    def fits(self, host: Mapping[str, Any], device: str) -> bool:
        """Whether a row measured on `device` of a host, by its facts in `run.json`, is of this instance."""
        gpus = gpu_names(host)
        wanted = [
            self.host is None or self.host == host.get("hash"),
            self.cpu is None or _named(self.cpu, str(host.get("cpu_model") or "")),
            self.gpu is None or any(_named(self.gpu, name) for name in gpus),
            self.logical_cpus is None or self.logical_cpus == host.get("logical_cpus"),
            self.device is None or self.device == device,
            bool(self.gpu or self.host or self.device) or not gpus,
        ]
        return all(wanted)

    @property
    def closeness(self) -> int:
        """A host's own hash goes before a device, and a device before the rest."""
        return 2 if self.host else 1 if self.device else 0


class Price(_Strict):
    """One instance: what it costs an hour, when and by whom that was said, and which hosts it is."""

    instance: str = Field(min_length=1, max_length=80)
    price_per_hour: float = Field(gt=0, le=1e6, strict=True)
    currency: str = Field(pattern=r"^[A-Z]{3}$", description="three letters (ISO 4217)")
    date: datetime.date
    source: str = Field(min_length=1)
    match: Match

    @field_validator("date", mode="before")
    @classmethod
    def _day(cls, value: Any) -> Any:
        # a date in quotes is a text to YAML; a time of day or a number is none
        if isinstance(value, str):
            try:
                return datetime.date.fromisoformat(value)
            except ValueError:
                raise ValueError("a day such as 2026-01-31 is expected") from None
        if type(value) is not datetime.date:
            raise ValueError("a day such as 2026-01-31 is expected")
        return value

    @field_validator("date")
    @classmethod
    def _past(cls, value: datetime.date) -> datetime.date:
        # a day of grace: it may be tomorrow already where the price was read
        if value > datetime.date.today() + datetime.timedelta(days=1):
            raise ValueError("the day on which the price was read is expected, not one to come")
        return value

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "instance": self.instance,
            "price_per_hour": self.price_per_hour,
            "currency": self.currency,
            "date": self.date.isoformat(),
            "source": self.source,
        }


class PriceList(_Strict):
    """The whole file: at least one price, all of one currency, each instance once."""

    utilization: float = Field(UTILIZATION, gt=0, le=1, strict=True)
    prices: list[Price] = Field(min_length=1)

    @model_validator(mode="after")
    def _alike(self) -> PriceList:
        currencies = sorted({price.currency for price in self.prices})
        if len(currencies) > 1:
            raise ValueError(f"prices are in {' and '.join(currencies)}: give all in one currency")
        names = [price.instance for price in self.prices]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"instance '{twice[0]}' stands twice: give each once")
        return self

    @property
    def currency(self) -> str:
        return self.prices[0].currency

    def find(self, host: Mapping[str, Any], device: str) -> tuple[Price | None, str | None]:
        """The one price of a host's rows on `device`, or None and why there is none.

        Of several that fit, the closest goes first (see `Match.closeness`); two that are as close decide nothing.
        """
        fitting = [price for price in self.prices if price.match.fits(host, device)]
        closest = max((price.match.closeness for price in fitting), default=0)
        left = [price for price in fitting if price.match.closeness == closest]
        if len(left) == 1:
            return left[0], None
        looked_for = f"{describe(host)}, {device} rows, host {host.get('hash') or 'without a hash'}"
        if not left:
            return None, f"no price matches {looked_for}"
        names = ", ".join(price.instance for price in left)
        return None, f"several prices match {looked_for}: {names}. Narrow their match, by host for example"

    def told(self) -> dict[str, Any]:
        """What was assumed, as JSON has it."""
        return {"utilization": self.utilization, "currency": self.currency}


def _named(part: str, name: str) -> bool:
    """Whether a name holds these whole words, in upper or lower case."""
    return bool(re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", name, re.IGNORECASE))


def gpu_names(host: Mapping[str, Any]) -> list[str]:
    """Names of a host's GPUs by the facts in `run.json`, which may come from somebody else."""
    gpus = host.get("gpus")
    return (
        [str(gpu.get("name")) for gpu in gpus if isinstance(gpu, Mapping)] if isinstance(gpus, list) else []
    )


def describe(host: Mapping[str, Any]) -> str:
    """A host in words: processor, logical CPUs, GPUs."""
    counted: dict[str, int] = {}
    for name in gpu_names(host):
        counted[name] = counted.get(name, 0) + 1
    gpus = [f"{count} x {name}" if count > 1 else name for name, count in counted.items()]
    cpus = host.get("logical_cpus")
    words = [str(host.get("cpu_model") or "an unknown CPU"), *([f"{cpus} logical CPUs"] if cpus else [])]
    return ", ".join([*words, *(gpus or ["no GPU"])])


def read(path: Path) -> PriceList:
    """The price list in a YAML file. Raises QtoolError naming the key and what would work."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise QtoolError(f"cannot read the price list {path}: {why}. Give a YAML file.") from None
    try:
        content = strict_yaml.load(text)
    except (yaml.YAMLError, RecursionError, ValueError, KeyError) as error:
        raise QtoolError(f"{path} is not valid YAML: {' '.join(str(error).split())[:160]}.") from None
    if not isinstance(content, dict):
        raise QtoolError(
            f"{path} holds {type(content).__name__}, expected 'prices:' with a list. See docs/prices.yaml."
        )
    try:
        return PriceList.model_validate(content)
    except ValidationError as error:
        raise QtoolError(f"{path}: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """The first mistake on one line: where, what, and what would work."""
    errors = error.errors(include_url=False)
    # a misspelt key is missing too: the spelling is what to tell
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    *place, key = first["loc"] or ("",)
    where = ".".join(str(part) for part in place)
    before = f"{where}: " if where else ""
    if first["type"] == "extra_forbidden":
        model = Match if place[-1:] == ["match"] else Price if place else PriceList
        return f"{before}unknown key '{key}'.{did_you_mean(str(key), model.model_fields)}"
    if first["type"] == "missing":
        return f"{before}key '{key}' is missing."
    told = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(first["input"], dict):
        return f"{before}{f'{key}: ' if key != '' else ''}{told}."
    return f"{before}{key}: {told}, found {_short(first['input'])}."


def _short(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "no finite number"
    return repr(value)[:80]
