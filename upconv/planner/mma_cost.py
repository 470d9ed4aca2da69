"""What the mma.sync kernel costs: the work of one block in, cycles out.

The constants are fitted by `benchmarks/fit_mma.py` to tilings measured on an H200
(`benchmarks/results/h200-mma-tilings-*`, 785 runs of 57 problems), by least squares with
non-negative terms over the 702 that are not far from the best of their problem; the standard
deviation is 8.6 %, and the tiling that the rule picks takes 2.4 % more than the best measured. The
terms add up because few warps share a scheduler: what one of them does beside its products shows. A
test compares the constants with the fit, and the picks with the best.
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
    "products": 2.81,
    "mixed": 7.754,
    "split": 2.441,
    "pixel_loads": 19.07,
    "filled": 0.04675,
    "stages": 127.2,
    "stored": 0.07764,
    "runs": 1.81,
    "starts": 402.8,
}
"""For each unit of the `BlockWork` field of that name. Products and pixel loads go together in the
measurements, so that their share is not certain; their sum is."""
FULL_WARPS = 8
"""Of 64 pixels: as many as a multiprocessor's registers hold."""
IDLE_POWER = 0.8
"""How the time of the main loop grows when fewer than FULL_WARPS warps share a multiprocessor."""
CROWD_POWER = 0.2
"""How all but the products gets faster with more of them. Those run at 0.94 of their rate with
FULL_WARPS already, and what waits does so for the memory and for a scheduler that it shares."""
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
    """Warps that set themselves up and lay their sums down, as of 64 pixels: instructions that are
    executed once."""

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
        sums = sum(terms[name] * slower(name, warps * blocks) for name in terms)
        return sums * LONE_BLOCK if blocks == 1 else sums


def slower(stage: str, warps: int) -> float:
    """How many times as long a stage (of `BlockWork.terms`) takes beside so many warps, its own
    block's among them, as beside FULL_WARPS."""
    if warps < FULL_WARPS:
        return 1.0 if stage == "the stores" else float((FULL_WARPS / warps) ** IDLE_POWER)
    return 1.0 if stage == "the products" else float((FULL_WARPS / warps) ** CROWD_POWER)


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
