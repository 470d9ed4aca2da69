"""The kernel for the weight's gradient of depthwise layers with a stride: division and cost.

csrc/cuda/depthwise_wgrad.cuh tells the idea. A unit is some rows of blocks and some columns of one
plane of grad_output; a team of threads walks down its rows. `shares` thread blocks divide the units
of a channel, or of a channel and a tap of the depth. The bias's gradient comes with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from . import depthwise
from .candidate import Candidate, Refusal
from .depthwise import COLUMNS, MOST_THREADS, Layer
from .operands import OPERANDS
from .problem import Hardware, Problem

KERNEL = "depthwise_wgrad"

FORMS = ((1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2))
"""Rows of a block in a thread, blocks that a pixel meets in height and width. The kernel is
compiled for these."""
STAGES = {4: 4, 2: 8}
"""Steps on their way, by the bytes of an element."""
REGISTERS = (96, 80, 96, 96, 96, 128)
"""Of each form, on Hopper."""
THREADS = (128, 256)
TILES = (1, 2, 3, 4, 6, 8, 12, 16)
FEWEST_LANES = 16
"""Of a team whose row is cut into tiles."""
STRIPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
WAVES = (1, 2, 3, 4)
SECTOR = 32
"""Bytes that are read together."""
PLACED_TOGETHER = 8
"""Elements of the input that a thread reads at a time."""
LONGEST_SUM = 512
"""Products that a thread adds up in a row, at most: the errors of longer sums would be above those
of PyTorch's kernels."""
WORKSPACE_BYTES = 32 << 20
INPUT_BYTES = 32 * 1024
"""Of the input in shared memory, for all teams of a block."""

LAUNCH_MICROSECONDS = 4.72
ADD_MICROSECONDS = 3.67
"""Of the second kernel."""
WORKSPACE_TERABYTES = 1.13
ISSUE = 0.655
"""Share of the issue slots that are used."""
MEMORY_BYTES = 4.2e6
CACHE_BYTES = 4.63e6
"""In a microsecond: from memory, and what is read again, from the second-level cache."""
UNHIDDEN = 0.231
"""Share of what takes less time than the longest that does not hide."""
START_CYCLES = 3880.0
UNIT_CYCLES = 290.0
STEP_CYCLES = 480.0
ARRIVAL_CYCLES = 100.0
PLACE_CYCLES = 946.0
ROUND_CYCLES = 20.0
"""Of a block that is alone: once, for each unit, for a row of blocks and its share of the time that
rows take to come, for the elements of the input that a thread places at a time, and for a round of
the tree."""
SINGLE_CYCLES = 400.0
"""The time that rows take to come where elements are copied one at a time: all of it."""
PIECE_CYCLES = 164.0
"""For each copy of a row but the first: threads side by side copy what lies far apart."""
START_INSTRUCTIONS = 713.0
UNIT_INSTRUCTIONS = 121.0
STEP_INSTRUCTIONS = 4.0
PLACE_INSTRUCTIONS = 15.6
COPY_INSTRUCTIONS = 1.0
PIECE_INSTRUCTIONS = 6.74
"""For each row that a thread brings, and for each of its copies."""
WIDEN_INSTRUCTIONS = 0.3
"""For each element of a 16-bit type."""


@dataclass(frozen=True)
class Division:
    """A way to divide the work."""

    layer: Layer
    block_channels: int
    teams: int
    lanes: int
    strip: int
    shares: int
    hardware: Hardware

    @property
    def problem(self) -> Problem:
        return self.layer.problem

    # --- a thread block

    @property
    def rows(self) -> int:
        """Of a block, in a thread."""
        return rows_of(self.layer)

    @property
    def row_groups(self) -> int:
        return -(-self.layer.stride[1] // self.rows)

    @property
    def threads(self) -> int:
        return self.block_channels * self.teams * self.row_groups * self.lanes

    @property
    def tile(self) -> int:
        return COLUMNS * self.lanes

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.rows * self.layer.reach_y * self.layer.reach_x * COLUMNS

    @property
    def x_columns(self) -> int:
        stride = self.layer.stride[2]
        return (self.tile + stride - 2) // stride + self.layer.reach_x

    @property
    def input_bytes(self) -> int:
        rows = self.strip + self.layer.reach_y - 1
        return self.block_channels * self.teams * rows * self.x_columns * 4

    @cached_property
    def shared_bytes(self) -> int:
        element, class_lanes = self.layer.element, self.layer.period // COLUMNS
        ring = STAGES[element] * self.rows * self.threads * COLUMNS * element
        classes = self.block_channels * self.row_groups * class_lanes
        members = self.teams * (self.lanes // class_lanes)
        adding = classes * max(members // 2, 1) * self.sums * 4
        return max(ring + self.input_bytes, adding, self.threads * 8)

    @cached_property
    def together(self) -> int:
        """Blocks that a multiprocessor holds."""
        form = (self.rows, self.layer.reach_y, self.layer.reach_x)
        return depthwise.resident(self.threads, REGISTERS[FORMS.index(form)], self.shared_bytes)

    # --- the work

    @property
    def with_bias(self) -> bool:
        return adds_bias(self.layer)

    @property
    def deep(self) -> int:
        """Planes for each tap of the depth: for the bias also those that no pixel leads to."""
        layer = self.layer
        if not self.with_bias:
            return layer.in_size[0]
        last = (layer.out_size[0] - 1 + layer.padding[0]) // layer.stride[0]
        return max(layer.in_size[0], last + 1)

    @property
    def tiles_x(self) -> int:
        return -(-self.layer.out_size[2] // self.tile)

    @property
    def strips(self) -> int:
        return -(-block_rows(self.layer) // self.strip)

    @cached_property
    def units(self) -> int:
        """Of one channel and tap of the depth."""
        return self.layer.images * self.deep * self.strips * self.tiles_x

    @property
    def each(self) -> int:
        return -(-self.units // (self.shares * self.teams))

    @property
    def blocks(self) -> int:
        channels = -(-self.layer.channels // self.block_channels)
        return channels * self.layer.kernel[0] * self.shares

    @property
    def longest_sum(self) -> int:
        return self.each * self.strip

    @property
    def workspace_bytes(self) -> int:
        layer, depth = self.layer, self.layer.stride[0]
        if self.shares == 1 and not (self.with_bias and depth > 1):
            return 0
        bias = layer.channels * self.shares * depth * 8 if self.with_bias else 0
        return layer.channels * prod(layer.kernel) * self.shares * 4 + bias

    # --- the cost

    @property
    def placed(self) -> int:
        """Times that a thread places so many elements of the input for a unit."""
        rows = self.strip + self.layer.reach_y - 1
        return -(-self.x_columns // self.lanes) * -(-rows // (PLACED_TOGETHER * self.row_groups))

    @property
    def rounds(self) -> int:
        """Of the tree that adds up what threads have."""
        return (self.teams * self.lanes * COLUMNS // self.layer.period).bit_length()

    @cached_property
    def instructions(self) -> float:
        """Of a warp, for everything."""
        layer = self.layer
        copies = self.rows * (COPY_INSTRUCTIONS + PIECE_INSTRUCTIONS * layer.pieces)
        widen = self.rows * COLUMNS * WIDEN_INSTRUCTIONS if layer.element == 2 else 0
        bias = self.rows * (10 if layer.element == 4 else 7) if self.with_bias else 0
        step = self.sums + copies + widen + bias + COLUMNS * layer.reach_x + self.rows
        unit = self.strip * (step + STEP_INSTRUCTIONS) + UNIT_INSTRUCTIONS
        unit += PLACE_INSTRUCTIONS * PLACED_TOGETHER * self.placed
        return self.each * unit + 3 * self.sums * self.rounds + START_INSTRUCTIONS

    @property
    def chain(self) -> float:
        """Cycles of a block that is alone."""
        layer = self.layer
        arrival = ARRIVAL_CYCLES / (STAGES[layer.element] - 1)
        unit = UNIT_CYCLES + self.placed * PLACE_CYCLES
        arrival = arrival if layer.vector > 2 else SINGLE_CYCLES
        unit += self.strip * (STEP_CYCLES + arrival + (layer.pieces - 1) * PIECE_CYCLES)
        return START_CYCLES + self.each * unit + self.rounds * ROUND_CYCLES

    @cached_property
    def microseconds(self) -> float:
        layer, machine = self.layer, self.hardware.multiprocessors
        issue = -(-self.threads // 32) * self.instructions / 4 / ISSUE
        busy = depthwise.busy_cycles(self.blocks, machine, self.together, issue, self.chain)
        row = -(-self.tile * layer.element // SECTOR) * SECTOR
        rows = self.units * self.strip * layer.stride[1]
        read = rows * row * layer.channels * layer.kernel[0]
        adding = 0.0
        if self.workspace_bytes:
            adding = ADD_MICROSECONDS + 2 * self.workspace_bytes / WORKSPACE_TERABYTES / 1e6
        return (
            LAUNCH_MICROSECONDS
            + adding
            + depthwise.together(
                UNHIDDEN,
                busy / depthwise.CLOCK_MHZ,
                self.problem.bytes / MEMORY_BYTES,
                read / CACHE_BYTES,
            )
        )

    @property
    def notes(self) -> tuple[str, ...]:
        bias = ("adds up the bias's gradient on the way",) if self.with_bias else ()
        return (
            f"{self.lanes} x {self.row_groups} threads walk down {self.strip} rows of blocks of"
            f" grad_output; a thread has {self.sums} sums of {self.longest_sum} products at most",
            f"{self.blocks} blocks of {self.block_channels} channels times {self.teams} such"
            f" units, {self.shares} for each channel; a workspace of"
            f" {self.workspace_bytes / 2**20:.3g} MiB, added up in a fixed order",
            *bias,
        )


def rows_of(layer: Layer) -> int:
    return 1 if layer.stride[1] == layer.reach_y == 1 else 2


def block_rows(layer: Layer) -> int:
    """Rows of blocks that grad_output has."""
    padding, stride = layer.padding[1], layer.stride[1]
    return (layer.out_size[1] - 1 + padding) // stride + 1 - padding // stride


def adds_bias(layer: Layer) -> bool:
    """Is the bias's gradient wanted, and does every plane meet a tap of the depth?"""
    every = layer.kernel[0] >= layer.stride[0] and (layer.kernel[0] == 1 or layer.dilation_z == 1)
    return layer.problem.bias and every


def widths(layer: Layer) -> Iterator[int]:
    """Threads along a tile: places in blocks and in vectors are the same in each."""
    each = layer.period // COLUMNS
    whole = -(-layer.out_size[2] // COLUMNS)
    row_groups = -(-layer.stride[1] // rows_of(layer))
    found = set()
    for tiles in {*TILES, -(-whole * row_groups // MOST_THREADS)}:
        lanes = ceil(whole / tiles / each) * each
        if tiles == 1 or lanes >= FEWEST_LANES or each >= FEWEST_LANES:
            found.add(lanes)
    found = found or {each}
    yield from sorted(lanes for lanes in found if lanes * row_groups <= MOST_THREADS)


def divisions(problem: Problem, hardware: Hardware) -> Iterator[Division]:
    """Every way to divide the work that is worth a look."""
    layer = Layer(problem)
    rows = block_rows(layer)
    strips = sorted({-(-rows // n) for n in STRIPS if n <= rows})
    for lanes in widths(layer):
        for strip in strips:
            units = Division(layer, 1, 1, lanes, strip, 1, hardware).units
            blocks = {(c, min(teams, units)) for c, teams in blocks_of(layer, lanes)}
            for channels, teams in sorted(blocks):
                yield from shared(layer, channels, teams, lanes, strip, hardware)


def blocks_of(layer: Layer, lanes: int) -> set[tuple[int, int]]:
    """Channels and teams of a thread block."""
    team = lanes * -(-layer.stride[1] // rows_of(layer))
    found = set()
    for threads in THREADS:
        slots = max(1, threads // team)
        channels = 1
        while channels <= min(slots, 2 * layer.channels - 1):
            found.add((channels, slots // channels))
            channels *= 2
    return found


def shared(
    layer: Layer, channels: int, teams: int, lanes: int, strip: int, hardware: Hardware
) -> Iterator[Division]:
    """With as many blocks as make a few whole waves."""
    one = Division(layer, channels, teams, lanes, strip, 1, hardware)
    if one.threads > MOST_THREADS or one.input_bytes > INPUT_BYTES or strip > LONGEST_SUM:
        return
    if one.shared_bytes > min(hardware.shared_memory, depthwise.SHARED_BYTES - 1024):
        return
    most = -(-one.units // teams)
    least = min(most, -(-one.longest_sum // LONGEST_SUM))
    machine = hardware.multiprocessors * one.together
    wanted = {max(least, min(most, machine * n // one.blocks)) for n in WAVES}
    for shares in sorted(wanted):
        each = -(-one.units // (max(1, shares) * teams))
        even = -(-one.units // (each * teams))
        way = Division(layer, channels, teams, lanes, strip, even, hardware)
        if way.workspace_bytes <= WORKSPACE_BYTES and way.longest_sum <= LONGEST_SUM:
            yield way


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = depthwise.legality(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    best = min(divisions(problem, hardware), key=lambda way: way.microseconds, default=None)
    if best is None:
        return Refusal(
            KERNEL,
            f"a thread block has no room for a unit, or sums this long take a workspace over"
            f" {WORKSPACE_BYTES >> 20} MiB",
        )
    return Candidate(KERNEL, best.microseconds, record(best), best.notes, best.with_bias)


def scalar_fields(way: Division) -> dict[str, int]:
    """The scalars of csrc/cuda/depthwise_params.h by name, in its order."""
    layer = way.layer
    return {
        "type": OPERANDS[way.problem.dtype],
        "by_weight": 1,
        "reach_y": layer.reach_y,
        "reach_x": layer.reach_x,
        "rows": way.rows,
        "vector": layer.vector,
        "lanes": way.lanes,
        "row_groups": way.row_groups,
        "teams": way.teams,
        "block_channels": way.block_channels,
        "tile": way.tile,
        "tiles_x": way.tiles_x,
        "strip": way.strip,
        "strips": way.strips,
        "deep": way.deep,
        "shares": way.shares,
        "folded": int(layer.folded),
        "sums": int(way.with_bias),
        **layer.fields(),
    }


def record(way: Division) -> tuple[int, ...]:
    """The plan as integers, in the order of csrc/cuda/depthwise_params.h."""
    return tuple(scalar_fields(way).values())
