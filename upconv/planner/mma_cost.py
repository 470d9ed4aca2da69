"""What the mma.sync kernel costs: the work of one block in, cycles out."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .problem import Hardware

CLOCK_MHZ = 1700.0
"""Sustained under tensor load on an H200."""
DRAM_BYTES = 18.4
"""Bytes a cycle: 4.27 TB/s copy rate, for one of 132 multiprocessors at CLOCK_MHZ."""
PRODUCT_CYCLES = 6.6
"""One m16n8 product on one of the four tensor cores of a multiprocessor."""
PACK_MICROSECONDS = 8.0
"""Packing the weights: a second launch, where the weight is not frozen."""
BLOCK_CYCLES = 2500.0
"""Start of a block, first slice and last store, which only other blocks hide."""
START_CYCLES = 4000.0


@dataclass(frozen=True)
class BlockWork:
    """What one block has to do."""

    products: float
    """m16n8 products of one fragment row of every warp: 4 of them run at a time."""
    pixel_loads: float
    """Operand loads of a warp's 64 pixels, 16 wavefronts each."""
    weight_loads: float
    """Wavefronts of weight fragments."""
    filled: float
    """Slots written to the tile."""
    reads: float
    """Load instructions of a warp that fill it."""
    stored: float
    """Bytes of output."""
    runs: float
    """Contiguous runs of output."""
    weights: float
    """Bytes of packed weights streamed from L2."""

    @property
    def terms(self) -> dict[str, float]:
        """Cycles by stage, in words that `explain` prints."""
        return {
            "the tensor cores": self.products * PRODUCT_CYCLES,
            "shared memory": 16 * self.pixel_loads + self.weight_loads + self.filled / 8,
            "filling the tile": 4 * self.reads,
            "the stores": self.stored / 32 + 2 * self.runs,
        }

    @property
    def cycles(self) -> float:
        terms = self.terms
        main = max(terms["the tensor cores"], 1.1 * terms["shared memory"])
        return 1.05 * main + 0.5 * terms["filling the tile"] + terms["the stores"]

    @property
    def most(self) -> str:
        """The stage that takes most."""
        terms = self.terms
        return max(terms, key=lambda name: terms[name])


def problem_cycles(
    block: BlockWork, blocks: int, resident: int, warps: int, traffic: float, hardware: Hardware
) -> float:
    """Cycles of the whole problem: `resident` blocks of `warps` warps at a time on each of the
    multiprocessors, `traffic` bytes of input and output."""
    idle = 1.0 if resident * warps >= 8 else 1.35 if resident * warps >= 4 else 2.0
    each = block.cycles * idle + BLOCK_CYCLES / resident
    share = blocks / hardware.multiprocessors
    rounds = ceil(share) if share < 8 else share + 0.5
    memory = traffic / hardware.multiprocessors / DRAM_BYTES
    return max(each * rounds, 1.15 * memory) + START_CYCLES
