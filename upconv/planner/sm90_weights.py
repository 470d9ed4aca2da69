"""How the weights of the Hopper kernel come into shared memory, and who shares them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

STEP_PAIRS = 4
"""Entries of a tap list that share one weight block."""
STAGE_BYTES = 8192
"""A weight block."""
MAX_STAGES = 24
"""Of all rings, as kMaxStages in csrc/cuda/sm90_layout.cuh."""


@dataclass(frozen=True)
class WeightRings:
    """How the weights come: through one ring that the consumers share in turns, or one for each
    consumer, who then take no turns; or all at once, to stay."""

    rings: int
    stages: int
    """Weight blocks of each ring."""
    resident: bool = False

    @property
    def bytes(self) -> int:
        return self.rings * self.stages * STAGE_BYTES

    def fields(self) -> dict[str, int]:
        return {"rings": self.rings, "stages": self.stages, "resident": int(self.resident)}

    def __str__(self) -> str:
        if self.resident:
            each = " for each consumer" if self.rings == 2 else ""
            return f"all {self.stages} weight blocks{each} in shared memory"
        if self.rings == 2:
            return f"{self.stages} weight stages for each consumer, no turns"
        return f"{self.stages} weight stages"


def weight_rings(alternate: bool, groups: int, steps: int, job_steps: int) -> Iterator[WeightRings]:
    """Two steps stay in flight behind the newest one, so that a ring has three stages or more.
    `groups`: different weights that units need; `steps`: weight blocks of all of them; `job_steps`:
    of each job, 0 where they differ. A block of threads always has units of the same group where
    weights stay."""
    for stages in (8, 6, 4):
        yield WeightRings(1, stages)
    if groups == 1 and 0 < steps <= MAX_STAGES:
        yield WeightRings(1, steps, resident=True)
    elif alternate and 0 < job_steps <= MAX_STAGES:
        yield WeightRings(1, job_steps, resident=True)
    if not alternate:
        for stages in (6, 5, 4):
            yield WeightRings(2, stages)
        if 0 < 2 * job_steps <= MAX_STAGES:
            yield WeightRings(2, job_steps, resident=True)


def turn_slices(whole: bool, slices: int, slots: int) -> int:
    """Slices of one turn: all of a unit where units alternate or no turns are taken; else all of
    the ring but one: 3 % faster than half of it, in 140 pairs of tilings with three slots and in
    100 with seven or more."""
    return max(slices, 1) if whole else max(min(slices, slots - 1), 1)
