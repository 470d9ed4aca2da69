"""What the mma.sync kernel costs: the work of one block in, cycles out.

The constants are fitted by `benchmarks/fit_mma.py` to tilings measured on an H200
(`benchmarks/results/h200-mma-tilings-2026-11-15.jsonl`, 700 runs of 53 problems), by least squares
with non-negative terms over the 617 that are not far from the best of their problem; the standard
deviation is 9 %, and the tiling that the rule picks takes 3 % more than the best measured. The
terms add up because few warps share a scheduler: what one of them does beside its products shows. A
test compares the constants with the fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .problem import Hardware

CLOCK_MHZ = 1700.0
"""Sustained under tensor load on an H200."""
DRAM_BYTES = 18.4
"""Bytes a cycle: 4.27 TB/s copy rate, for one of 132 multiprocessors at CLOCK_MHZ."""

CYCLES = {
    "products": 3.235,
    "mixed": 7.86,
    "split": 2.268,
    "pixel_loads": 17.8,
    "filled": 0.04774,
    "stages": 108.8,
    "stored": 0.06925,
    "runs": 3.629,
    "starts": 395.7,
}
"""For each unit of the `BlockWork` field of that name. Products and pixel loads go together in the
measurements, so that their share is not certain; their sum is."""
IDLE_POWER = 0.8
"""How the time of the main loop grows when fewer than FULL_WARPS warps share a multiprocessor."""
FULL_WARPS = 8
LONE_BLOCK = 1.1
"""How much longer a block takes that has a multiprocessor to itself: while it fills or stores,
nobody multiplies."""
PACK_MICROSECONDS = 8.0
"""Packing the weights: a second launch, where the weight is not frozen."""
START_CYCLES = 12000.0
"""Launch, first slice and last store, which nothing hides: what was measured of layers below 0.1 ms
is 1.1 times the rule with 4000."""


@dataclass(frozen=True)
class BlockWork:
    """What one block has to do."""

    products: float
    """m16n8 products for each of the four tensor cores of a multiprocessor."""
    mixed: float
    """Those of them in steps whose column tiles differ from step to step."""
    split: float
    """Those of them that multiply split float32."""
    pixel_loads: float
    """Steps of a warp: loads of 64 pixels, more where banks collide."""
    filled: float
    """16-byte slots written to the tile, each by what its kind costs (SLOT_COST)."""
    stages: float
    """Stages of a warp."""
    stored: float
    """Bytes of output."""
    runs: float
    """Contiguous runs of output."""
    starts: float
    """Warps that set themselves up and lay their sums down: instructions that are executed once."""

    @property
    def terms(self) -> dict[str, float]:
        """Cycles by stage, in words that `explain` prints."""
        cost = {name: CYCLES[name] * getattr(self, name) for name in CYCLES}
        return {
            "the products": cost["products"] + cost["mixed"] + cost["split"],
            "loading operands": cost["pixel_loads"] + cost["stages"],
            "filling the tile": cost["filled"],
            "starting and staging": cost["starts"],
            "the stores": cost["stored"] + cost["runs"],
        }

    @property
    def most(self) -> str:
        """The stage that takes most."""
        terms = self.terms
        return max(terms, key=lambda name: terms[name])

    def cycles(self, warps: int, blocks: int) -> float:
        """Cycles of a multiprocessor that has `blocks` blocks of `warps` warps at a time."""
        terms = self.terms
        idle = float((FULL_WARPS / (warps * blocks)) ** IDLE_POWER)
        sums = idle * (sum(terms.values()) - terms["the stores"]) + terms["the stores"]
        return sums * LONE_BLOCK if blocks == 1 else sums


def rounds(blocks: int, hardware: Hardware) -> float:
    """Blocks that one multiprocessor runs; few of them do not spread evenly."""
    share = blocks / hardware.multiprocessors
    return ceil(share) if share < 8 else share + 0.5


def problem_cycles(
    block: BlockWork, blocks: int, resident: tuple[int, int], traffic: float, hardware: Hardware
) -> float:
    """Cycles of the whole problem, which moves `traffic` bytes of input and output; `resident` are
    the warps of a block and the blocks that a multiprocessor has at a time."""
    memory = traffic / hardware.multiprocessors / DRAM_BYTES
    return max(block.cycles(*resident) * rounds(blocks, hardware), 1.15 * memory) + START_CYCLES
