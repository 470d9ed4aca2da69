"""What the page shows: the rows of all files, each with the machine it was measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

from ..bench import Row
from ..contenders import TITLES
from ..floor import Rates
from ..results import ResultsError, read_results, rows_of
from ..tables import machine_text

EVEN = 0.05
"""Times closer than this share are called even: medians repeat no better."""

FACETS = {
    "machine": "Machine",
    "direction": "Direction",
    "dtype": "Data type",
    "layout": "Layout",
    "dims": "Dimensions",
}
"""What rows can be filtered by, and what the filter is called."""


def plain(name: str) -> str:
    """A processor's name without its trademarks."""
    return name.replace("(R)", "").replace("(TM)", "")


@dataclass(frozen=True)
class Source:
    """One result file."""

    name: str
    schema: int
    environment: dict[str, Any]
    device: str
    machine: str
    complete: bool
    rates: dict[str, Rates]
    """By dtype; empty in files of older versions."""

    @staticmethod
    def of(path: Path, results: dict[str, Any]) -> Source:
        rates = results.get("machine_rates", {})
        return Source(
            path.name,
            results["schema"],
            results["environment"],
            results["settings"]["device"],
            plain(machine_text(results)),
            bool(results.get("complete", True)),
            {dtype: Rates(**found) for dtype, found in rates.items()},
        )


@dataclass(frozen=True)
class Entry:
    """One row of the page."""

    row: Row
    source: Source

    @property
    def facets(self) -> dict[str, str]:
        kind = self.row.kind
        return {
            "machine": self.source.machine,
            "direction": kind.direction,
            "dtype": kind.dtype,
            "layout": kind.layout,
            "dims": f"{self.row.problem.ndim}-D",
        }

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Rows that stand under one heading."""
        return (self.source.machine, *self.row.kind)

    @property
    def peers(self) -> list[str]:
        """The contenders that were timed beside upconv, in the order of the columns."""
        return [name for name in TITLES if name != "upconv" and name in self.row.times]

    @property
    def verdict(self) -> str:
        """One of "faster", "even", "slower", "wrong": against the fastest of the others."""
        ratio = self.row.ratio
        if not self.row.correct:
            return "wrong"
        if ratio is None:
            return "untimed"
        if abs(ratio - 1) <= EVEN:
            return "even"
        return "faster" if ratio > 1 else "slower"


@dataclass(frozen=True)
class Collection:
    entries: list[Entry]
    sources: list[Source]
    replaced: int
    """Rows that a later file measured again."""

    @property
    def groups(self) -> dict[tuple[str, str, str, str], list[Entry]]:
        found: dict[tuple[str, str, str, str], list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.group, []).append(entry)
        return found

    def values(self, facet: str) -> list[str]:
        found = dict.fromkeys(entry.facets[facet] for entry in self.entries)
        return sorted(found) if facet == "dims" else list(found)


def geometric_mean(ratios: Sequence[float]) -> float | None:
    return exp(sum(map(log, ratios)) / len(ratios)) if ratios else None


def read_entries(paths: Sequence[str | Path]) -> Collection:
    """All rows; where two files hold the same row, that of the later file."""
    latest: dict[tuple[object, ...], Entry] = {}
    sources: list[Source] = []
    count = 0
    for path in map(Path, paths):
        results = read_results(path)
        source = Source.of(path, results)
        sources.append(source)
        for row in rows_of(results):
            count += 1
            entry = Entry(row, source)
            latest[(*entry.group, row.case, row.problem)] = entry
    if not latest:
        raise ResultsError("there is no row in these files: measure with `upconv bench --out`")
    return Collection(list(latest.values()), sources, count - len(latest))
