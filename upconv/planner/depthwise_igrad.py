"""The kernel for the input's gradient of depthwise layers with a stride: division and cost.

csrc/cuda/depthwise_igrad.cuh tells the idea. A unit is some rows and columns of one plane of the
input; a team of threads, side by side along the blocks of grad_output, walks down its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from . import depthwise
from .candidate import Candidate, Refusal
from .depthwise import COLUMNS, MOST_PAD, MOST_THREADS, PAD, Layer
from .operands import OPERANDS
from .problem import Hardware, Problem

KERNEL = "depthwise_igrad"

ROWS = 4
"""Of grad_output that a thread brings at a time."""
STAGES = {4: 3, 2: 5}
"""Steps on their way, by the bytes of an element."""
REGISTERS = {(1, 1): 80, (1, 2): 104, (2, 1): 96, (2, 2): 112}
"""Of each form, on Hopper. A form is the blocks that a pixel meets in height and width; the kernel
is compiled for these."""
THREADS = (64, 128, 256)
STRIPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
LANES = (256, 128, 64)
"""Threads along a row, where a row is cut into tiles."""

LAUNCH_MICROSECONDS = 6.76
ISSUE = 0.65
"""Share of the issue slots that are used."""
MEMORY_BYTES = 3.85e6
CACHE_BYTES = 7e6
"""In a microsecond: from memory, and what is read again, from the second-level cache."""
UNHIDDEN = 0.094
"""Share of what takes less time than the longest that does not hide."""
START_CYCLES = 825.0
"""Of a block, however few there are: weights, and until the first rows have come."""
GROUP_CYCLES = 50.0
STEP_CYCLES = 276.0
ARRIVAL_CYCLES = 826.0
PIXEL_CYCLES = 35.9
"""Of a block that is alone: for the barriers of a group of rows, for a step and its share of the
time that rows take to come, and for a column of pixels of a thread."""
SINGLE_CYCLES = 1090.0
"""The time that rows take to come where elements are copied one at a time: all of it."""
PIECE_CYCLES = 264.0
"""For each copy of a row but the first: threads side by side copy what lies far apart."""
START_INSTRUCTIONS = 439.0
GROUP_INSTRUCTIONS = 34.1
STEP_INSTRUCTIONS = 4.0
PIXEL_INSTRUCTIONS = 60.0
COPY_INSTRUCTIONS = 5.81
PIECE_INSTRUCTIONS = 11.5
"""For each row that a thread brings, and for each of its copies."""
WIDEN_INSTRUCTIONS = 0.526
"""For each element of a 16-bit type."""


@dataclass(frozen=True)
class Division:
    """A way to divide the work."""

    layer: Layer
    teams: int
    tile: int
    strip: int
    hardware: Hardware

    @property
    def problem(self) -> Problem:
        return self.layer.problem

    @property
    def tiles_x(self) -> int:
        return -(-self.layer.in_size[2] // self.tile)

    @property
    def strips(self) -> int:
        return -(-self.layer.in_size[1] // self.strip)

    @cached_property
    def lanes(self) -> int:
        return lanes_of(self.layer, self.tile)

    @property
    def threads(self) -> int:
        return self.teams * self.lanes

    @cached_property
    def units(self) -> int:
        layer = self.layer
        planes = layer.images * layer.channels * layer.in_size[0]
        return planes * self.strips * self.tiles_x

    @property
    def blocks(self) -> int:
        return -(-self.units // self.teams)

    @property
    def groups(self) -> int:
        return -(-(self.strip + self.layer.reach_y - 1) // ROWS)

    @cached_property
    def shared_bytes(self) -> int:
        layer = self.layer
        ring = STAGES[layer.element] * ROWS * self.threads * COLUMNS * layer.element
        weights = layer.kernel[0] * layer.kernel[1] * layer.reach_x * layer.period
        columns = (self.tile + layer.reach_x - 1) * layer.stride[2]
        stride = layer.stride[2]
        left_out = (columns - 1) // max(PAD, stride) if MOST_PAD % stride == 0 else 0
        padded = columns + left_out
        return ring + self.teams * (weights + ROWS * layer.reach_x * padded) * 4

    @cached_property
    def together(self) -> int:
        """Blocks that a multiprocessor holds."""
        registers = REGISTERS[self.layer.reach_y, self.layer.reach_x]
        return depthwise.resident(self.threads, registers, self.shared_bytes)

    @property
    def pixels(self) -> int:
        """Of a thread, after each group of rows: columns of so many rows."""
        return -(-self.tile // self.lanes)

    @property
    def steps(self) -> int:
        return self.groups * self.layer.kernel[0] * self.layer.stride[1]

    @cached_property
    def instructions(self) -> float:
        """Of a warp for one unit."""
        layer = self.layer
        products = ROWS * COLUMNS * layer.reach_y * layer.reach_x
        widen = ROWS * COLUMNS * WIDEN_INSTRUCTIONS if layer.element == 2 else 0
        copies = ROWS * (COPY_INSTRUCTIONS + PIECE_INSTRUCTIONS * layer.pieces)
        step = products + widen + copies + ROWS + layer.reach_y * layer.reach_x
        pixel = (1 + ROWS) * layer.stride[2] * layer.reach_x + PIXEL_INSTRUCTIONS
        group = ROWS * COLUMNS * layer.reach_x + self.pixels * pixel + GROUP_INSTRUCTIONS
        step += STEP_INSTRUCTIONS
        return self.steps * step + self.groups * group + START_INSTRUCTIONS

    @property
    def chain(self) -> float:
        """Cycles of a block that is alone."""
        arrival = ARRIVAL_CYCLES / (STAGES[self.layer.element] - 1)
        if self.layer.vector == 2:
            arrival = SINGLE_CYCLES
        group = GROUP_CYCLES + self.pixels * PIXEL_CYCLES
        step = STEP_CYCLES + arrival + (self.layer.pieces - 1) * PIECE_CYCLES
        return START_CYCLES + self.groups * group + self.steps * step

    @cached_property
    def microseconds(self) -> float:
        layer, machine = self.layer, self.hardware.multiprocessors
        issue = -(-self.threads // 32) * self.instructions / 4 / ISSUE
        busy = depthwise.busy_cycles(self.blocks, machine, self.together, issue, self.chain)
        read = self.units * self.steps * ROWS * self.lanes * COLUMNS * layer.element
        return LAUNCH_MICROSECONDS + depthwise.together(
            UNHIDDEN,
            busy / depthwise.CLOCK_MHZ,
            self.problem.bytes / MEMORY_BYTES,
            read / CACHE_BYTES,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"{self.lanes} threads side by side walk down grad_output for {self.strip} rows of"
            f" {self.tile} pixels; every element has {self.layer.reach_y} x {self.layer.reach_x}"
            " products",
            f"{self.blocks} blocks of {self.teams} such units,"
            f" {self.shared_bytes / 1024:.3g} KiB of shared memory",
        )


def lanes_of(layer: Layer, tile: int) -> int:
    """Threads along the columns that a tile meets, wherever its first vector begins."""
    columns = (tile + layer.reach_x - 1) * layer.stride[2]
    if tile < layer.in_size[2]:
        return -(-(columns + COLUMNS - 1) // COLUMNS)
    return max(1, -(-min(layer.out_size[2], columns - layer.padding[2]) // COLUMNS))


def widths(layer: Layer) -> Iterator[int]:
    """Pixels of a tile: all of a row, or as many as so many threads have room for."""
    whole = layer.in_size[2]
    if lanes_of(layer, whole) <= MOST_THREADS:
        yield whole
        return
    for lanes in LANES:
        most = ((lanes - 1) * COLUMNS + 1) // layer.stride[2] - (layer.reach_x - 1)
        if most > 0:
            yield -(-whole // -(-whole // most))


def divisions(problem: Problem, hardware: Hardware) -> Iterator[Division]:
    """Every way to divide the work that is worth a look."""
    layer = Layer(problem)
    rows = layer.in_size[1]
    strips = sorted({-(-rows // n) for n in STRIPS if n <= rows})
    for tile in sorted(set(widths(layer))):
        lanes = lanes_of(layer, tile)
        for teams in sorted({max(1, threads // lanes) for threads in THREADS}):
            for strip in strips:
                way = Division(layer, teams, tile, strip, hardware)
                if legal(way):
                    yield way


def legal(way: Division) -> bool:
    return (
        way.threads <= MOST_THREADS
        and way.shared_bytes <= min(way.hardware.shared_memory, depthwise.SHARED_BYTES - 1024)
        and way.units < depthwise.MOST_PIXELS
    )


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = depthwise.legality(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    best = min(divisions(problem, hardware), key=lambda way: way.microseconds, default=None)
    if best is None:
        return Refusal(KERNEL, "the weights of a channel do not fit into shared memory")
    return Candidate(KERNEL, best.microseconds, record(best), best.notes)


def scalar_fields(way: Division) -> dict[str, int]:
    """The scalars of csrc/cuda/depthwise_params.h by name, in its order."""
    layer = way.layer
    return {
        "type": OPERANDS[way.problem.dtype],
        "by_weight": 0,
        "reach_y": layer.reach_y,
        "reach_x": layer.reach_x,
        "rows": 1,
        "vector": layer.vector,
        "lanes": way.lanes,
        "row_groups": 1,
        "teams": way.teams,
        "block_channels": 1,
        "tile": way.tile,
        "tiles_x": way.tiles_x,
        "strip": way.strip,
        "strips": way.strips,
        "deep": 1,
        "shares": 1,
        "folded": int(layer.folded),
        "sums": 0,
        **layer.fields(),
    }


def record(way: Division) -> tuple[int, ...]:
    """The plan as integers, in the order of csrc/cuda/depthwise_params.h."""
    return tuple(scalar_fields(way).values())
