"""What the Hopper kernel for the weight's gradient costs, and how its work is split over blocks.

Every chunk keeps five units busy; the slowest of them sets the pace, because the ring of chunks
decouples them. Rates are those of an H200: a multiprocessor reads 128 bytes of shared memory a
cycle, of which the products alone take 64, and gets about 24 bytes a cycle from L2 when all of them
ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .problem import Hardware, Problem
from .sm90_cost import CLOCK_MHZ, DRAM_BYTES

if TYPE_CHECKING:
    from .sm90_wgrad import Chunk, Form

L2_BYTES = 24.0
"""Bytes a cycle for one multiprocessor, all of them reading."""
SHARED_BYTES = 128.0
COPY_CYCLES = 0.055
"""Issuing one copy of a producer thread, 128 of them side by side."""
ROUND_CYCLES = 0.06
WAIT_CYCLES = 0.9
"""Loading one element through registers: by latency."""
BATCH_CYCLES = 90.0
"""Loading the windows of a batch of products, as far as other warpgroups do not hide it."""
LATENCY_CYCLES = 1500.0
CHUNK_CYCLES = 150.0
SHADOW = 0.1
"""Share of what the faster units do that is felt all the same."""
LAUNCH_MICROSECONDS = 8.0
"""Two launches, first chunk, last store."""
ADD_BYTES = 2500.0
"""Partial sums read or written, bytes a microsecond and thousandth."""
MAX_WORKSPACE = 64 * 2**20


@dataclass(frozen=True)
class ChunkWork:
    """What one chunk asks of the units of a multiprocessor."""

    tensor: float
    """Cycles of the tensor cores."""
    batches: float
    windows: float
    """Bytes that the consumers read into registers."""
    read: float
    """Bytes that come from L2, in whole sectors."""
    filled: float
    """Bytes of the chunk."""
    copies: float
    """Copies of all producer threads."""
    rounded: float
    waits: float
    lag: int
    """Chunks on their way at a time."""

    @property
    def terms(self) -> dict[str, float]:
        """Cycles by unit, in words that `explain` prints."""
        filled = self.filled + 8 * self.rounded
        return {
            "the tensor cores": self.tensor + BATCH_CYCLES * self.batches,
            "shared memory": (64 * self.tensor + self.windows + filled) / SHARED_BYTES,
            "L2": self.read / L2_BYTES,
            "the copies": COPY_CYCLES * self.copies
            + ROUND_CYCLES * self.rounded
            + WAIT_CYCLES * self.waits,
            "waiting for memory": LATENCY_CYCLES / self.lag,
        }

    @property
    def cycles(self) -> float:
        terms = self.terms.values()
        return (1 - SHADOW) * max(terms) + SHADOW * sum(terms) + CHUNK_CYCLES

    @property
    def bound(self) -> str:
        terms = self.terms
        return max(terms, key=lambda name: terms[name])


@dataclass(frozen=True)
class Split:
    """How pixels are shared out over blocks."""

    band_rows: int
    bands: int
    workers: int
    workspace: int
    microseconds: float
    bound: str


def splits(
    problem: Problem,
    chunk: Chunk,
    work: Sequence[ChunkWork],
    extra_rows: int,
    channel_blocks: int,
    form: Form,
    hardware: Hardware,
) -> Iterator[Split]:
    """Ways to cut rows into bands and to give them to workers, with their expected times."""
    height = problem.in_size[0]
    columns = -(-problem.batch // chunk.images) * -(-problem.in_size[1] // chunk.segment)
    kinds = len(work) * channel_blocks
    cycles = sum(each.cycles for each in work) / len(work)
    slowest = max(work, key=lambda each: each.cycles)
    memory = problem.bytes / DRAM_BYTES / hardware.multiprocessors
    block_bytes = form.consumers * form.sums * 128 * 4
    counts = {max(hardware.multiprocessors * waves // kinds, 1) for waves in (1, 2, 3)}
    for band_rows in {-(-height // cut) for cut in (1, 2, 3, 4, 6, 8, 12, 16, 32)}:
        bands = -(-height // band_rows)
        units = columns * bands
        for count in counts:
            workers = min(count, units)
            workspace = workers * kinds * block_bytes
            if workers > 1 and workspace > MAX_WORKSPACE:
                continue
            waves = -(-workers * kinds // hardware.multiprocessors)
            chunks = -(-units // workers) * (min(band_rows, height) + extra_rows)
            total = max(waves * chunks * cycles, memory)
            added = (workspace * 2 + problem.in_channels * problem.out_channels * 32) / ADD_BYTES
            yield Split(
                band_rows,
                bands,
                workers,
                workspace,
                total / CLOCK_MHZ + added / 1000 + LAUNCH_MICROSECONDS,
                slowest.bound if total > memory else "memory",
            )
