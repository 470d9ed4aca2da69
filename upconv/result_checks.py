"""Are the fields of a result file what they should be? Asked once, so that nobody else needs to.

A file may have been damaged or edited by hand. Only fields that somebody reads are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .explain import check
from .planner import Problem

Rule = Callable[[str, Any], None]
"""Raises Damaged for a value that cannot be; the text is where it stands in the file."""

LARGEST = (1 << 63) - 1
"""No size of a tensor is larger; products of eight such can still be floats."""
DIRECTIONS = ("forward", "backward")


class Damaged(ValueError):
    """The text names the field, what it should be and what it is."""


def rule(wanted: str, fits: Callable[[Any], bool]) -> Rule:
    def follow(where: str, value: Any) -> None:
        if not fits(value):
            raise Damaged(f"{where} should be {wanted}, is {repr(value)[:80]}")

    return follow


def between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


text = rule("a text", lambda value: isinstance(value, str))
flag = rule("true or false", lambda value: isinstance(value, bool))
table = rule("a table of names", lambda value: isinstance(value, dict))
some = rule("a list", lambda value: isinstance(value, list))
count = rule("a whole number", lambda value: type(value) is int and 0 <= value <= LARGEST)
error = rule("a number from 0 on", between(0.0, float("inf")))
time = rule("a time in milliseconds", between(1e-12, 1e24))
rate = rule("a rate per second", between(1.0, 1e24))
sizes = rule(
    "a list of 1 to 3 whole numbers",
    lambda value: (
        isinstance(value, list)
        and len(value) in (1, 2, 3)
        and all(type(size) is int and 0 <= size <= LARGEST for size in value)
    ),
)


def or_none(found: Rule) -> Rule:
    def follow(where: str, value: Any) -> None:
        if value is not None:
            found(where, value)

    return follow


def each(found: Rule) -> Rule:
    """A table whose values follow the rule."""

    def follow(where: str, value: Any) -> None:
        table(where, value)
        for name, part in value.items():
            found(f"{where}.{name}", part)

    return follow


def fields(needed: dict[str, Rule], others: dict[str, Rule] | None = None) -> Rule:
    """A table with these fields; the others may be missing, as in files of older schemas."""

    def follow(where: str, value: Any) -> None:
        table(where or "the file", value)
        start = f"{where}." if where else ""
        for name, found in needed.items():
            if name not in value:
                raise Damaged(f"{start}{name} is missing")
            found(start + name, value[name])
        for name, found in (others or {}).items():
            if name in value:
                found(start + name, value[name])

    return follow


def problem(where: str, value: Any) -> None:
    """Sizes of a layer that exists."""
    _PROBLEM(where, value)
    unknown = sorted(set(value) - set(Problem.__dataclass_fields__))
    if unknown:
        raise Damaged(f"{where}.{unknown[0]} is not a field of a layer")
    known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    try:
        check(Problem(**known))
    except ValueError as reason:
        raise Damaged(f"{where} is no layer: {reason}") from None


_SIZES = ("in_size", "kernel", "stride", "padding", "output_padding", "dilation")
_PROBLEM = fields(
    dict.fromkeys(("in_channels", "out_channels"), count)
    | dict.fromkeys(_SIZES, sizes)
    | {
        "batch": rule(
            "a whole number from 1 on", lambda value: type(value) is int and 0 < value <= LARGEST
        )
    },
    {"groups": count, "bias": flag, "dtype": text, "channels_last": flag, "tf32": flag}
    | {"direction": text},
)
_TIMING = fields(dict.fromkeys(("median", "low", "high", "fastest"), time) | {"runs": count})
_ROW = fields(
    {
        "case": text,
        "problem": problem,
        "full_batch": count,
        "kernel": text,
        "errors": each(or_none(error)),
        "limit": error,
        "times": each(_TIMING),
    },
    {
        "reason": text,
        "direction": rule("forward or backward", lambda value: value in DIRECTIONS),
        "failure": text,
        "skipped": each(text),
        "scratch": each(count),
        "gradients": each(each(or_none(error))),
        "limits": each(error),
        "floor_ms": or_none(time),
    },
)
_HARDWARE = fields({"name": text, "kind": text}, {"threads": count, "isa": text})
_CPU = fields({"threads": count, "isa": text})
_FILE = fields(
    {
        "environment": fields(
            {"upconv": text, "torch": text, "hardware": _HARDWARE, "date": text},
            {"commit": or_none(text), "cuda": or_none(text)},
        ),
        "settings": fields({"device": text}),
        "rows": some,
    },
    {
        "complete": flag,
        "machine_rates": each(fields({"flop_per_s": rate, "byte_per_s": rate})),
    },
)


def check_results(results: dict[str, Any]) -> None:
    """Damaged where a field is not what it should be."""
    some("rows", results.get("rows"))
    for index, row in enumerate(results["rows"]):
        _ROW(f"rows[{index}]", row)
    _FILE("", results)
    machine = results["environment"]["hardware"]
    if machine["kind"] == "cpu":
        _CPU("environment.hardware", machine)
