"""What the mma.sync kernel costs: the work of one block in, cycles out.

The constants are fitted by `benchmarks/fit_mma.py` to tilings measured on an H200
(`benchmarks/results/h200-mma-tilings-2026-11-15.jsonl`, 320 runs of 10 problems), by least squares
with non-negative terms; the standard deviation is 8 %. The terms add up because few warps share a
scheduler: what one of them does beside its products shows. A test compares the constants with the
fit.
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
    "products": 1.319,
    "mixed": 4.015,
    "split": 3.991,
    "pixel_loads": 53.92,
    "filled": 2.241,
    "stages": 76.92,
    "stored": 0.1449,
    "runs": 2.379,
}
"""For each unit of the `BlockWork` field of that name. Products and pixel loads go together in the
measurements, so that their share is not certain; their sum is."""
IDLE_POWER = 0.8
"""How the time of the main loop grows when fewer than FULL_WARPS warps share a multiprocessor."""
FULL_WARPS = 8
PACK_MICROSECONDS = 8.0
"""Packing the weights: a second launch, where the weight is not frozen."""
START_CYCLES = 4000.0
"""Launch, first slice and last store, which nothing hides."""


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
    """Steps of a warp: loads of its 64 pixels, more where banks collide."""
    filled: float
    """16-byte slots written to the tile."""
    stages: float
    """Stages of a warp."""
    stored: float
    """Bytes of output."""
    runs: float
    """Contiguous runs of output."""

    @property
    def terms(self) -> dict[str, float]:
        """Cycles by stage, in words that `explain` prints."""
        cost = {name: CYCLES[name] * getattr(self, name) for name in CYCLES}
        return {
            "the products": cost["products"] + cost["mixed"] + cost["split"],
            "loading operands": cost["pixel_loads"] + cost["stages"],
            "filling the tile": cost["filled"],
            "the stores": cost["stored"] + cost["runs"],
        }

    @property
    def most(self) -> str:
        """The stage that takes most."""
        terms = self.terms
        return max(terms, key=lambda name: terms[name])

    def cycles(self, resident_warps: int) -> float:
        """Cycles of a multiprocessor, with so many warps of all its blocks at a time."""
        terms = self.terms
        idle = float((FULL_WARPS / resident_warps) ** IDLE_POWER)
        return idle * (sum(terms.values()) - terms["the stores"]) + terms["the stores"]


def rounds(blocks: int, hardware: Hardware) -> float:
    """Blocks that one multiprocessor runs; few of them do not spread evenly."""
    share = blocks / hardware.multiprocessors
    return ceil(share) if share < 8 else share + 0.5


def problem_cycles(
    block: BlockWork, blocks: int, resident_warps: int, traffic: float, hardware: Hardware
) -> float:
    """Cycles of the whole problem, which moves `traffic` bytes of input and output."""
    memory = traffic / hardware.multiprocessors / DRAM_BYTES
    return (
        max(block.cycles(resident_warps) * rounds(blocks, hardware), 1.15 * memory) + START_CYCLES
    )
