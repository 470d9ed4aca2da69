"""What the Hopper kernel for the weight's gradient costs, and how its work is split over blocks.

The constants are fitted by `benchmarks/fit_wgrad.py` to 3,817 plans of the cases and of 145 drawn
layers, measured on an H200 (`benchmarks/results/h200-wgrad-*`). Producers and consumers overlap
only in part, because they share the port of the shared memory: of the faster side a half is felt,
and all of it where the ring has no slot to spare. The standard deviation of the whole is 12 %; what
is picked is 2 to 3 % slower than the fastest plan measured of a case, 3 to 4 % of a drawn layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING

from .problem import Problem
from .sm90_cost import CLOCK_MHZ, DRAM_BYTES

if TYPE_CHECKING:
    from .sm90_wgrad_chunks import Chunk
    from .sm90_wgrad_jobs import Form

PRODUCER_CYCLES = {
    "copied": 217.7,
    "copies": 41.29,
    "read": 0.0138,
    "places": 163.9,
    "boxes": 42.71,
    "starts": 123.3,
    "chunk": 406.7,
}
"""For each unit of the `ChunkWork` field of that name; "chunk" is what each one costs besides."""
CONSUMER_CYCLES = {
    "tensor": 0.6463,
    "batches": 166.8,
    "windows": 0.004688,
    "rounded": 44.75,
    "woven": 22.38,
}
EDGE_CYCLES = 60.0
"""Zeros beside a row of a plane, where rows begin anywhere."""
WAIT_CYCLES = 100.0
"""A pass of element loads through registers, eight on their way at a time: 97 plans take 0.78 to
1.23 of what is expected then."""
SHADOW = {False: 1.0, True: 0.5812}
"""Share of the faster side that is felt, without and with a slot to spare."""
ROW_BYTES = 77.49
"""What the start of each row of a chunk costs the memory, as if it were so many bytes more."""
TOGETHER = 4
LAUNCH_MICROSECONDS = {4: 14.0, 2: 10.0}
"""Two launches, the first chunk, the last store, by bytes of an element: those with the least
deviation, which is 0.140 with 22 and 15.5 and 0.128 with 9 for both."""
ADD_BYTES = 2.5e6
"""Partial sums read or written in a microsecond."""
MAX_WORKSPACE = 64 * 2**20
SUM_CYCLES = {"direct": 300.0, "woven": 1500.0}
"""What a plane of a chunk costs that is added to the bias's gradient: 150 to 420 over 9 layers
where the TMA brings everything as it is read, 1,500 to 1,600 over 3 where the producers weave
16-bit words."""
ROUNDED_CYCLES = 450.0
"""What a chunk of float32 costs besides, since then the consumers round. With a plane, woven or
not, 600 to 1,050 over 10 layers."""
SUMS_GAIN = 0.85
"""A pass over grad_output must be dearer than that by so much."""


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
    woven: float
    """Vectors that a producer thread reorders, of what the TMA has brought."""
    copied: float
    """1 where threads copy the input."""
    places: float
    """Parts of planes for which a producer thread computes addresses."""
    boxes: float
    """Boxes that the TMA brings."""
    starts: float
    """1 where every chunk is a unit of work of its own."""
    edges: float
    """Rows of planes beside which a producer thread writes zeros."""
    waits: float
    """Element loads of a producer thread."""
    spare: bool
    """Does the ring have a slot to spare?"""

    @cached_property
    def producers(self) -> float:
        return self._sum(PRODUCER_CYCLES) + WAIT_CYCLES * self.waits + EDGE_CYCLES * self.edges

    @cached_property
    def consumers(self) -> float:
        return max(self._sum(CONSUMER_CYCLES), self.tensor)

    def _sum(self, cycles: dict[str, float]) -> float:
        total = cycles.get("chunk", 0.0)
        for name, cost in cycles.items():
            total += 0.0 if name == "chunk" else cost * float(getattr(self, name))
        return total

    @cached_property
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


@dataclass(frozen=True)
class Blocks:
    """The jobs of a plan, and what is known of them before their pixels are shared out."""

    problem: Problem
    form: Form
    chunk: Chunk
    work: Sequence[ChunkWork]
    extra_rows: Sequence[int]
    multiprocessors: int

    @cached_property
    def channel_blocks(self) -> int:
        return -(-self.problem.in_channels // self.form.n)

    @cached_property
    def strips(self) -> int:
        images = self.problem.batch * self.problem.in_size[0]
        return -(-images // self.chunk.images) * -(-self.problem.in_size[2] // self.chunk.segment)

    def cycles(self, job: int, workers: int) -> float:
        height, extra = self.problem.in_size[1], self.extra_rows[job]
        return chunk_count(self.strips, height, extra, workers) * self.work[job].cycles

    @cached_property
    def memory(self) -> tuple[float, float]:
        """Cycles of the least traffic, and those bytes' share that a chunk's rows begin anew."""
        rows = self.chunk.segment * self.problem.stride[2] * self.problem.element_bytes
        return self.problem.bytes / DRAM_BYTES / self.multiprocessors, 1 / rows

    def total(self, cycles: float) -> float:
        """Multiprocessors and memory: where both have much to do neither is at its best."""
        least, rows = self.memory
        memory = least * (1 + ROW_BYTES * rows)
        return float((cycles**TOGETHER + memory**TOGETHER) ** (1 / TOGETHER))

    def rounds(self, workers: Sequence[int]) -> int:
        return -(-sum(workers) * self.channel_blocks // self.multiprocessors)

    def workspace(self, workers: Sequence[int]) -> int:
        sums = self.form.consumers * self.form.sums * 128
        return sum(workers) * self.channel_blocks * sums * 4

    def besides(self, workers: Sequence[int]) -> float:
        """Microseconds for launches and for adding up."""
        weights = self.problem.in_channels * self.problem.out_channels * prod(self.problem.kernel)
        launch = LAUNCH_MICROSECONDS[self.problem.element_bytes]
        return launch + (2 * self.workspace(workers) + 12 * weights) / ADD_BYTES

    def split(self, workers: tuple[int, ...]) -> Split:
        """The expected time with so many blocks for each job."""
        slowest = max(range(len(workers)), key=lambda job: self.cycles(job, workers[job]))
        cycles = self.rounds(workers) * self.cycles(slowest, workers[slowest])
        total = self.total(cycles)
        bound = self.work[slowest].bound if cycles > self.memory[0] else "memory"
        microseconds = total / CLOCK_MHZ + self.besides(workers)
        return Split(workers, self.workspace(workers), microseconds, bound)

    def with_sums(self, workers: tuple[int, ...], planes: Sequence[int]) -> float:
        """Expected microseconds where each job adds so many planes to the bias's gradient.

        Blocks of input channels take turns.
        """
        wide = self.problem.element_bytes == 4
        each = SUM_CYCLES["woven" if self.form.woven and not wide else "direct"]
        rounding = ROUNDED_CYCLES if wide else 0.0
        more = [rounding + each * count / self.channel_blocks for count in planes]
        cycles = max(
            self.cycles(job, workers[job]) * (1 + more[job] / self.work[job].cycles)
            for job in range(len(workers))
        )
        total = self.total(self.rounds(workers) * cycles)
        return total / CLOCK_MHZ + self.besides(workers)

    def splits(self) -> Iterator[Split]:
        """Ways to give rows of strips of images to workers."""
        times = [partial(self.cycles, job) for job in range(len(self.work))]
        for waves in (1, 2, 3):
            blocks = max(self.multiprocessors * waves // self.channel_blocks, len(self.work))
            split = self.split(share_out(blocks, self.strips * self.problem.in_size[1], times))
            if split.workspace <= MAX_WORKSPACE or sum(split.workers) == len(self.work):
                yield split
