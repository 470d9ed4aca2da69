"""The CUDA-core kernel for the weight's gradient: when it may serve, how it is divided, its cost.

The kernel (csrc/cuda/direct_wgrad.cuh) gives every thread some input channels and some columns of
the weight (an output channel with one depth and one height of the kernel); the taps along the width
lie in the lanes of a warp. This module picks how many of each, and how many blocks divide the
pixels, by the least expected time, and writes it as the integers that
csrc/cuda/direct_grad_params.h reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from .candidate import Candidate, Refusal
from .direct import TYPES
from .legality import first_refusal
from .problem import ELEMENT_BYTES, Hardware, Problem, three

KERNEL = "direct_wgrad"

FLOAT_TILES = ((1, 4), (1, 8), (1, 16), (2, 8), (4, 8), (8, 4), (8, 9))
NARROW_TILES = ((1, 4), (1, 8), (2, 8), (4, 8), (8, 4), (8, 9))
DOUBLE_TILES = ((1, 8), (4, 4))
"""Input channels and columns of a thread, "narrow": of 16-bit types. The kernel is compiled for
these. 16 columns of 16 bits took twice the time of 8."""
WARPS, NARROW_WARPS = 4, 8
"""Of a block; and with 16-bit types and one input channel a thread."""
STAGED_PIXELS, STAGED_OUTPUTS = 32, 160
"""Columns of the input, and of a row of grad_output, that a warp stages at a time, at most."""
PIECES = (2, 8)
"""Chunks of a warp in one piece of a row, where rows are cut."""
MOST_WAVES = 6
LONGEST_SUM = 512
"""Products that a thread adds up in a row: the rounding errors of longer sums would be above those
of PyTorch's kernels."""
WORKSPACE_BYTES = 32 << 20
"""Sums of all warps, at most."""

CLOCK_MHZ = 1900.0
SHARED_BYTES = 227 * 1024
ISSUE, NARROW_ISSUE = 0.76, 0.55
"""Share of the issue slots that are used, staged and straight from global memory."""
COPY = 7.5
"""Instructions to stage one element in each lane."""
CHUNK_WAIT, STEP_WAIT, LONE_CYCLES = 1220.0, 320.0, 3.8
"""Cycles until a chunk has come, until the operands of a step have, and from one instruction of a
warp to its next."""
CACHE_BYTES, DRAM_BYTES = 22.0, 15.7
"""Bytes a cycle and multiprocessor from the second-level cache, and from memory."""
UNHIDDEN = 0.3
"""Share of what takes less time than the longest of arithmetic and traffic that does not hide."""
UNIT_INSTRUCTIONS = 218
"""Of a warp for each unit, besides its steps."""
LAUNCH_MICROSECONDS = 13.0
"""Of both kernels."""
WORKSPACE_TERABYTES = 1.5
# Fitted to 456 runs of 16 layers on an H200, both gradients, with a standard deviation of 15 %; of
# the divisions that were measured of a layer, the rule picks one that takes 2 % more than the best,
# in geometric mean.


@dataclass(frozen=True)
class Division:
    """A way to divide the work."""

    problem: Problem
    inputs: int
    columns: int
    segment: int
    shares: int
    multiprocessors: int

    # --- one warp

    @property
    def staged(self) -> bool:
        """Through shared memory; 16-bit types are read straight from global memory."""
        return self.problem.element_bytes >= 4

    @property
    def warps(self) -> int:
        return NARROW_WARPS if self.inputs == 1 and not self.staged else WARPS

    @cached_property
    def x_tiles(self) -> int:
        """As few parts of the kernel's width as the lanes take and shared memory holds."""
        most = min(32, (STAGED_OUTPUTS - 1) // self.problem.dilation[-1] + 1)
        return -(-self.problem.kernel[-1] // most)

    @cached_property
    def lanes_x(self) -> int:
        return -(-self.problem.kernel[-1] // self.x_tiles)

    @cached_property
    def pixels(self) -> int:
        """Pixels whose outputs fit into shared memory."""
        room = STAGED_OUTPUTS - 1 - (self.lanes_x - 1) * self.problem.dilation[-1]
        return min(STAGED_PIXELS, room // self.problem.stride[-1] + 1)

    @cached_property
    def slots(self) -> int:
        return min(32 // self.lanes_x, self.pixels)

    @property
    def chunk(self) -> int:
        return self.pixels // self.slots * self.slots

    @property
    def sum_bytes(self) -> int:
        return 8 if self.problem.dtype == "float64" else 4

    @property
    def sums(self) -> int:
        return self.inputs * self.columns * self.lanes_x

    # --- the weight

    @cached_property
    def all_columns(self) -> int:
        problem = self.problem
        return problem.out_channels // problem.groups * prod(problem.kernel[:-1])

    @property
    def column_tiles(self) -> int:
        return -(-self.all_columns // self.columns)

    @property
    def channel_tiles(self) -> int:
        return -(-(self.problem.in_channels // self.problem.groups) // max(self.inputs, 1))

    @cached_property
    def tiles(self) -> int:
        """Parts of the weight, over all groups."""
        return self.x_tiles * self.column_tiles * self.channel_tiles * self.problem.groups

    # --- the pixels

    @property
    def segments(self) -> int:
        return -(-self.problem.in_size[-1] // self.segment)

    @cached_property
    def all_units(self) -> int:
        return self.problem.batch * prod(self.problem.in_size[:-1]) * self.segments

    @property
    def units(self) -> int:
        return -(-self.all_units // self.shares)

    @property
    def steps(self) -> int:
        """Of a warp in one unit."""
        whole, rest = divmod(self.segment, self.chunk)
        return whole * (self.chunk // self.slots) + -(-rest // self.slots)

    @property
    def longest_sum(self) -> int:
        return -(-self.units // self.warps) * self.steps

    @property
    def workspace_bytes(self) -> int:
        return self.tiles * self.shares * self.warps * self.sums * self.sum_bytes

    # --- the cost

    @property
    def together(self) -> int:
        """Blocks that a multiprocessor holds."""
        if not self.staged:
            return 3 if self.inputs == 1 else 4
        staged = self.inputs * STAGED_PIXELS + self.columns * STAGED_OUTPUTS
        room = SHARED_BYTES // (self.warps * staged * self.sum_bytes + 1024)
        return min(room, 4 if self.inputs > 1 else 5 if self.columns > 8 else 6)

    @cached_property
    def outputs(self) -> int:
        """Columns of grad_output that a unit meets, over all of its chunks."""
        chunks = -(-self.segment // self.chunk) if self.staged else 1
        margin = (self.lanes_x - 1) * self.problem.dilation[-1] + 1 - self.problem.stride[-1]
        return self.segment * self.problem.stride[-1] + chunks * margin

    @cached_property
    def instructions(self) -> float:
        """Of a warp for one unit."""
        words = self.sum_bytes // 4
        loads = self.inputs + self.columns
        step = max(self.inputs, 1) * self.columns * words + loads + 7
        if self.inputs == 0:  # the lanes of a pixel add up what they have
            step += self.columns + 5 * (self.lanes_x - 1).bit_length() * words + 14
        if not self.staged:
            return UNIT_INSTRUCTIONS + self.steps * (step + 3 * loads)
        chunks = -(-self.segment // self.chunk)
        copies = ceil(self.outputs / chunks / 32) * (self.columns * COPY + 10) + self.inputs * COPY
        return UNIT_INSTRUCTIONS + self.steps * step + chunks * (copies + 60)

    @cached_property
    def microseconds(self) -> float:
        """Waves of blocks, each as long as the multiprocessor is busy or as one warp takes."""
        issue, wait = (ISSUE, CHUNK_WAIT) if self.staged else (NARROW_ISSUE, STEP_WAIT)
        waits = -(-self.segment // self.chunk) if self.staged else self.steps
        rows = -(-self.units // self.warps)
        block = rows * self.warps * self.instructions / 4 / issue
        chain = rows * (waits * wait + self.instructions * LONE_CYCLES)
        waves, rest = divmod(self.tiles * self.shares, self.multiprocessors * self.together)
        busy = waves * max(self.together * block, chain)
        if rest:
            busy += max(ceil(rest / self.multiprocessors) * block, chain)
        read = self.inputs * self.segment + self.columns * self.outputs
        passes = self.tiles * self.all_units * read * self.problem.element_bytes
        cached = passes / CACHE_BYTES / self.multiprocessors
        memory = self.problem.bytes / DRAM_BYTES / self.multiprocessors
        times = sorted((busy, cached, memory))
        adding = 2 * self.workspace_bytes / WORKSPACE_TERABYTES / 1e6
        return (times[2] + UNHIDDEN * (times[0] + times[1])) / CLOCK_MHZ + (
            adding + LAUNCH_MICROSECONDS
        )

    @property
    def notes(self) -> tuple[str, ...]:
        width = f"{self.lanes_x} taps of the width times {self.slots} pixels"
        return (
            f"a thread adds up {self.inputs} input channels times {self.columns} columns (output"
            f" channels and rows of the kernel); the lanes of a warp lie along {width}",
            f"{self.shares} blocks of {self.warps} warps divide the pixels for each of"
            f" {self.tiles} parts of the weight, sums of at most {self.longest_sum} products;"
            f" a workspace of {self.workspace_bytes / 2**20:.3g} MiB, added up in a fixed order",
        )


def legality(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = first_refusal(problem, hardware, ELEMENT_BYTES)
    if reason:
        return reason
    most = max(columns for _, columns in FLOAT_TILES)
    planes = max(8 * prod(problem.in_size), (most + 1) * prod(problem.out_size))
    if planes >= 1 << 31:
        return "some channels of one image have 2^31 elements or more"
    widest = max(n * s + k * d for n, k, s, _, _, d in problem.dimensions)
    if max(widest, problem.batch * prod(problem.in_size)) >= 1 << 30:
        return "2^30 pixels or more"
    if problem.weight_elements >= 1 << 31:
        return "the weight has 2^31 elements or more"
    return None


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = legality(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    best = min(divisions(problem, hardware), key=lambda way: way.microseconds, default=None)
    if best is None:
        return Refusal(KERNEL, f"sums this long take a workspace over {WORKSPACE_BYTES >> 20} MiB")
    return Candidate(KERNEL, best.microseconds, record(best), best.notes)


def tiles_of(dtype: str) -> tuple[tuple[int, int], ...]:
    if dtype == "float64":
        return DOUBLE_TILES
    return FLOAT_TILES if ELEMENT_BYTES[dtype] == 4 else NARROW_TILES


def divisions(problem: Problem, hardware: Hardware) -> Iterator[Division]:
    """Every way to divide the work that is worth a look."""
    channels, width = problem.in_channels // problem.groups, problem.in_size[-1]
    for inputs, columns in tiles_of(problem.dtype):
        if 1 < inputs >= 2 * channels:
            continue
        one = Division(problem, inputs, columns, width, 1, hardware.multiprocessors)
        pieces = {width} | {min(width, chunks * one.chunk) for chunks in PIECES}
        for segment in sorted(pieces):
            yield from shared(problem, inputs, columns, segment, hardware)


def shared(
    problem: Problem, inputs: int, columns: int, segment: int, hardware: Hardware
) -> Iterator[Division]:
    """With as many blocks as make a few whole waves."""
    machine = hardware.multiprocessors
    one = Division(problem, inputs, columns, segment, 1, machine)
    most = -(-one.all_units // one.warps)
    short = -(-one.longest_sum // LONGEST_SUM)
    wanted = {machine * n // one.tiles for n in range(1, 4 * MOST_WAVES + 1)}
    for shares in sorted({min(max(short, n), most) for n in wanted}):
        way = Division(problem, inputs, columns, segment, shares, machine)
        if way.workspace_bytes <= WORKSPACE_BYTES and way.longest_sum <= 2 * LONGEST_SUM:
            yield way


def scalar_fields(division: Division) -> dict[str, int]:
    """The scalars of csrc/cuda/direct_grad_params.h by name, in its order."""
    problem = division.problem

    def each(name: str, names: str, values: tuple[int, ...], absent: int) -> dict[str, int]:
        full = three(values, absent)
        return {f"{name}_{n}": value for n, value in zip(names, full, strict=True)}

    return {
        "type": TYPES.index(problem.dtype),
        "inputs": division.inputs,
        "columns": division.columns,
        "warps": division.warps,
        "batch": problem.batch,
        "groups": problem.groups,
        "in_channels": problem.in_channels // problem.groups,
        "out_channels": problem.out_channels // problem.groups,
        **each("in", "dhw", problem.in_size, 1),
        **each("out", "dhw", problem.out_size, 1),
        **each("kernel", "zyx", problem.kernel, 1),
        **each("stride", "zyx", problem.stride, 1),
        **each("padding", "zyx", problem.padding, 0),
        **each("dilation", "zyx", problem.dilation, 1),
        "lanes_x": division.lanes_x,
        "slots": division.slots,
        "chunk": division.chunk,
        "x_tiles": division.x_tiles,
        "column_tiles": division.column_tiles,
        "channel_tiles": division.channel_tiles,
        "segment": division.segment,
        "segments": division.segments,
        "shares": division.shares,
        "units": division.units,
    }


def record(division: Division) -> tuple[int, ...]:
    """The plan as integers, in the order of csrc/cuda/direct_grad_params.h."""
    return tuple(scalar_fields(division).values())
