"""What the Hopper kernel for the weight's gradient costs, and how its work is split over blocks.

The constants are fitted by `benchmarks/fit_wgrad.py` to plans measured on an H200
(`benchmarks/results/h200-wgrad-2026-11-15.jsonl`): each was timed whole, without its copies and
without its products, which gives the two sides of the ring by themselves. The two overlap only in
part, because they share the port of the shared memory: of the faster side a third is felt, and
three quarters of it where the ring has no slot to spare. The standard deviation of the whole is
13 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from .problem import Hardware, Problem
from .sm90_cost import CLOCK_MHZ, DRAM_BYTES

if TYPE_CHECKING:
    from .sm90_wgrad import Chunk
    from .sm90_wgrad_jobs import Form

PRODUCER_CYCLES = {
    "copies": 17.17,
    "rounded": 39.4,
    "read": 0.0284,
    "places": 203.9,
    "starts": 770.2,
    "crowded": 49.8,
    "chunk": 406.9,
}
"""For each unit of the `ChunkWork` field of that name; "chunk" is what each one costs besides."""
CONSUMER_CYCLES = {
    "tensor": 0.5952,
    "batches": 239.4,
    "windows": 0.00415,
    "rounded": 68.9,
    "chunk": 551.9,
}
WAIT_CYCLES = 300.0
"""A pass of element loads through registers, four on their way at a time (160 to 380 measured)."""
SHADOW = {False: 0.77, True: 0.3}
"""Share of the faster side that is felt, without and with a slot to spare."""
LAUNCH_MICROSECONDS = 12.0
"""Two launches, the first chunk, the last store."""
ADD_BYTES = 2.5e6
"""Partial sums read or written in a microsecond."""
MAX_WORKSPACE = 64 * 2**20


@dataclass(frozen=True)
class ChunkWork:
    """What one chunk asks of producers and consumers."""

    tensor: float
    """Cycles that the tensor cores need by themselves."""
    batches: float
    """How often a consumer loads windows and waits for its products."""
    windows: float
    """Bytes that the consumers read into registers."""
    read: float
    """Bytes that come from L2, in whole sectors."""
    copies: float
    """Copies of a producer thread."""
    rounded: float
    """Words that a producer thread rounds."""
    places: float
    """Parts of planes for which a producer thread computes addresses."""
    starts: float
    """1 where every chunk is a unit of work of its own."""
    crowded: float
    """Copies of a producer thread that has too few registers."""
    waits: float
    """Element loads of a producer thread."""
    spare: bool
    """Does the ring have a slot to spare?"""

    @property
    def producers(self) -> float:
        return self._sum(PRODUCER_CYCLES) + WAIT_CYCLES * self.waits

    @property
    def consumers(self) -> float:
        return max(self._sum(CONSUMER_CYCLES), self.tensor)

    def _sum(self, cycles: dict[str, float]) -> float:
        counts = {**vars(self), "chunk": 1.0}
        return sum(cost * float(counts[name]) for name, cost in cycles.items())

    @property
    def cycles(self) -> float:
        fast, slow = sorted((self.producers, self.consumers))
        return slow + SHADOW[self.spare] * fast

    @property
    def bound(self) -> str:
        return "the copies" if self.producers > self.consumers else "the products"


@dataclass(frozen=True)
class Split:
    """How pixels are shared out over blocks: those of a job have as many rows each."""

    workers: tuple[int, ...]
    """Blocks of each job, for each block of input channels."""
    workspace: int
    microseconds: float
    bound: str


def chunk_count(strips: int, height: int, extra_rows: int, workers: int) -> int:
    """Chunks of the busiest of so many blocks, which share strips of rows."""
    rows = -(-strips * height // workers)
    parts = rows // height if strips % workers == 0 else -(-rows // height) + 1
    return rows + parts * extra_rows


def share_out(blocks: int, most: int, times: Sequence[Callable[[int], float]]) -> tuple[int, ...]:
    """Workers of each job, whose times for so many workers are given: the slowest gets the next."""
    single = [time(1) for time in times]
    workers = [min(max(int(blocks * time / sum(single)), 1), most) for time in single]
    while sum(workers) < blocks:
        slowest = max(range(len(times)), key=lambda j: times[j](workers[j]))
        if workers[slowest] == most:
            break
        workers[slowest] += 1
    return tuple(workers)


def splits(
    problem: Problem,
    chunk: Chunk,
    work: Sequence[ChunkWork],
    extra_rows: Sequence[int],
    channel_blocks: int,
    form: Form,
    hardware: Hardware,
) -> Iterator[Split]:
    """Ways to give rows of strips of images to workers, with their expected times."""
    depth, height, width = problem.in_size
    strips = -(-problem.batch * depth // chunk.images) * -(-width // chunk.segment)
    cycles = [each.cycles for each in work]
    memory = problem.bytes / DRAM_BYTES / hardware.multiprocessors
    block_bytes = form.consumers * form.sums * 128 * 4
    weights = problem.in_channels * problem.out_channels * prod(problem.kernel)

    def time(job: int, workers: int) -> float:
        return chunk_count(strips, height, extra_rows[job], workers) * cycles[job]

    every = [partial(time, job) for job in range(len(work))]
    for waves in (1, 2, 3):
        there = hardware.multiprocessors * waves // channel_blocks
        workers = share_out(max(there, len(work)), strips * height, every)
        blocks = sum(workers) * channel_blocks
        if len(work) < sum(workers) and blocks * block_bytes > MAX_WORKSPACE:
            continue
        slowest = max(range(len(work)), key=lambda job: time(job, workers[job]))
        rounds = -(-blocks // hardware.multiprocessors)
        total = max(rounds * time(slowest, workers[slowest]), memory)
        added = (2 * blocks * block_bytes + 32 * weights) / ADD_BYTES
        yield Split(
            workers,
            blocks * block_bytes,
            total / CLOCK_MHZ + added + LAUNCH_MICROSECONDS,
            work[slowest].bound if total > memory else "memory",
        )
