"""How the weights of the Hopper kernel come into shared memory, and who shares them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

STEP_PAIRS = 4
"""Entries of a tap list that share one weight block."""
SUM_PAIRS = 12
"""Pairs of a tap list that are summed by themselves at most, where float32 is split: a multiple of
STEP_PAIRS. Truncation then leaves an error of 1.4e-7, twice as many one of 2.9e-7, beside the
1.2e-7 of everything else; PyTorch's is 1.1e-7 at best."""
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
            return f"all {self.stages} weight blocks in shared memory"
        if self.rings == 2:
            return f"{self.stages} weight stages for each consumer, no turns"
        return f"{self.stages} weight stages"


def weight_rings(split: bool, alternate: bool, groups: int, steps: int) -> Iterator[WeightRings]:
    """Two steps stay in flight behind the newest one, so that a ring has three stages or more.
    `groups`: different weights that units need; `steps`: weight blocks of a unit."""
    for stages in (8, 6, 4):
        yield WeightRings(1, stages)
    if split:
        return
    if groups == 1 and 0 < steps <= MAX_STAGES:
        yield WeightRings(1, steps, resident=True)
    if not alternate:
        for stages in (6, 5, 4):
            yield WeightRings(2, stages)


def turn_slices(whole: bool, slices: int, slots: int) -> int:
    """Slices of one turn: all of a unit where units alternate or no turns are taken; else half of
    the ring, so that the next turn's slices arrive during this one."""
    return max(slices, 1) if whole else max(min(slices, slots // 2), 1)


def step_count(pairs: int, sum_pairs: int) -> int:
    """Weight blocks of a tap list: whole ones, then what is left as 2 and 1. Where float32 is
    split: of its parts of `sum_pairs`, and twice, tails and heads."""
    if sum_pairs:
        parts, left = divmod(pairs, sum_pairs)
        return 2 * (parts * step_count(sum_pairs, 0) + step_count(left, 0))
    return pairs // STEP_PAIRS + (pairs % STEP_PAIRS).bit_count()


def even_part(pairs: int) -> int:
    """Pairs that are summed by themselves: as few parts as may be, about the same size."""
    parts = max(-(-pairs // SUM_PAIRS), 1)
    return -(-max(-(-pairs // parts), 1) // STEP_PAIRS) * STEP_PAIRS
