"""`upconv bench --compare`: what got slower or faster than in an older result file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .bench import Row
from .planner import Problem
from .results import rows_of
from .stopwatch import Timing

LEAST_CHANGE = 0.10
"""A smaller change of the median is called none."""


@dataclass(frozen=True)
class Change:
    """One case in both files. `new` is None where upconv's result is wrong now."""

    case: str
    old: Timing
    new: Timing | None

    @property
    def ratio(self) -> float | None:
        """New time by old time: above 1 is slower."""
        return None if self.new is None else self.new.median / self.old.median

    @property
    def spread(self) -> float:
        """How far the quartiles lie from the medians, as a share of the old median, both added."""
        timings = [self.old] if self.new is None else [self.old, self.new]
        return sum(timing.high - timing.low for timing in timings) / 2 / self.old.median

    @property
    def verdict(self) -> str:
        """A change counts where it is larger than 10 % and than what the measurements scatter."""
        if self.ratio is None:
            return "WRONG now"
        least = max(LEAST_CHANGE, self.spread)
        if self.ratio - 1 > least:
            return "slower"
        # The mirror image: what would be slower if old and new changed places.
        if 1 / self.ratio - 1 > max(LEAST_CHANGE, self.spread / self.ratio):
            return "faster"
        return "same"

    @property
    def bad(self) -> bool:
        return self.verdict in ("slower", "WRONG now")


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    left_out: dict[str, str]
    """Cases in one of the files only, or that differ, and how."""
    notes: list[str]
    """What else changed: another machine, another version."""

    @property
    def bad(self) -> bool:
        """Something got worse; or nothing was compared, which must not pass for a good result."""
        return not self.changes or any(change.bad for change in self.changes)


def compare(old: dict[str, Any], new: dict[str, Any]) -> Comparison:
    """upconv's times of the same case, dtype, layout, device and batch in two result files."""
    before, after = keyed(old), keyed(new)
    several = len({row.kind for row in [*before.values(), *after.values()]}) > 1

    def named(row: Row) -> str:
        return f"{row.case} ({row.kind})" if several else row.case

    changes = [
        Change(named(row), before[key].times["upconv"], row.times.get("upconv"))
        for key, row in after.items()
        if key in before and "upconv" in before[key].times
    ]
    batches = {key[:-1]: row.problem.batch for key, row in before.items()}
    left_out: dict[str, str] = {}
    for key, row in after.items():
        if key not in before:
            batch = batches.get(key[:-1])
            left_out[named(row)] = (
                "not in the old file"
                if batch is None
                else f"batch {batch} in the old file, {row.problem.batch} now"
            )
        elif "upconv" not in before[key].times:
            left_out[named(row)] = "not timed in the old file"
    return Comparison(changes, left_out, differences(old, new))


def keyed(results: dict[str, Any]) -> dict[tuple[str, str, str, Problem, int], Row]:
    """The rows by all that must be equal to compare their times; the batch comes last."""
    device = results["settings"]["device"]
    return {
        (device, row.case, row.direction, replace(row.problem, batch=0), row.problem.batch): row
        for row in rows_of(results)
    }


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    there, here = old["environment"], new["environment"]
    pairs = [(name, there.get(name), here.get(name)) for name in ("torch", "upconv", "cuda")]
    for name in ("name", "threads", "isa"):
        pairs.append((name, there["hardware"].get(name), here["hardware"].get(name)))
    return [f"{name} {then} in the old file, {now} now" for name, then, now in pairs if then != now]
