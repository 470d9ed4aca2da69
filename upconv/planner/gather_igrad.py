"""The mma.sync kernel for the input's gradient: when it may serve, how it is divided, its cost.

csrc/cuda/gather_igrad.cuh tells the idea. A unit is some rows and columns of the input in all
channels of a group; its box of grad_output holds what its taps lead to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import gcd, prod

from . import gather
from .candidate import Candidate, Refusal
from .gather import Box, Job
from .operands import OPERANDS
from .problem import Hardware, Problem, three

KERNEL = "gather_igrad"

TILES = (1, 2, 4, 7)
"""Columns in 8s of a warp: input channels. The kernel is compiled for these."""
PIXELS = 64
"""Of a warp."""
WARPS = (4, 8)
ROWS = (1, 2, 4, 8, 16)
COLUMNS = (16, 32, 64, 128, 256)
RUNS = (1, 4)
MOST_WEIGHTS = 64 * 1024
"""Bytes of a group's weights in shared memory."""

LAUNCH_MICROSECONDS = 12.0
SETUP_CYCLES = 5000.0
"""Of a block: its lists and the first unit."""
WEIGHTS_TOGETHER, WEIGHT_CYCLES = 8, 700.0
"""Weights that a thread has on their way at a time, and until these have come."""
COPY = 4.8
ROW_COPY = 11.6
"""Instructions of a warp for one copy of all its lanes, and for each row that these are of."""
UNIT_INSTRUCTIONS = 68.0
SEGMENT_INSTRUCTIONS = 200.0
UNIT_CYCLES = 800.0
FULL_WARPS, THIN = 16, 0.35
"""Warps that fill a multiprocessor, and the power of what is missing of these that a unit takes
longer by."""
DRAM_SHARE = 0.62
"""Of the memory's rate."""
ISSUE = 0.47
STAGED_BYTES = 64.0
UNHIDDEN = 0.12

# Fitted to 446 runs of 20 layers on an H200, with a standard deviation of 19 %; of the divisions
# that were measured of a layer, the rule picks one that takes 9 % more than the best, in
# geometric mean (benchmarks/fit_gather.py). 103 calls of drawn layers took 0.6 to 1.6 times what it
# says, 1.0 at the median.


@dataclass(frozen=True)
class Division:
    """A way to divide the work."""

    problem: Problem
    tile: int
    warps: int
    rows: int
    columns: int
    run: int
    hardware: Hardware

    @property
    def step(self) -> int:
        """Of K, in one product."""
        return 16 if self.problem.element_bytes == 2 else 8

    @cached_property
    def sum(self) -> int:
        return self.problem.out_channels // self.problem.groups * prod(self.problem.kernel)

    @property
    def steps(self) -> int:
        return -(-self.sum // self.step)

    @cached_property
    def in_block(self) -> int:
        """Input channels, in whole tiles of a warp."""
        tiles = -(-self.problem.in_channels // self.problem.groups // 8)
        return -(-tiles // self.tile) * self.tile * 8

    @cached_property
    def box(self) -> Box:
        return gather.rows_by_input(self.problem, self.rows, three(self.problem.kernel, 1)[1])

    @property
    def gy_lines(self) -> int:
        channels = self.problem.out_channels // self.problem.groups
        return channels * three(self.problem.kernel, 1)[0] * self.box.rows

    @cached_property
    def gy_pitch(self) -> int:
        return gather.output_pitch(self.columns, self.problem, self.problem.kernel[-1])

    @property
    def gy_bytes(self) -> int:
        return -(-self.gy_lines * self.gy_pitch * self.problem.element_bytes // 128) * 128

    @property
    def weight_bytes(self) -> int:
        return self.in_block * self.steps * self.step * self.problem.element_bytes

    @property
    def table_bytes(self) -> int:
        lists = self.steps * self.step * 4 + self.gy_lines * 8
        return -(-(lists + self.weight_bytes) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        return self.table_bytes + 2 * self.gy_bytes

    @cached_property
    def together(self) -> int:
        """Blocks that a multiprocessor holds."""
        registers = 216 if self.tile > 4 else 128
        return max(
            1,
            min(
                gather.SHARED_BYTES // (self.shared_bytes + 1024),
                65536 // (registers * 32 * self.warps),
            ),
        )

    @cached_property
    def units(self) -> int:
        deep, high, wide = three(self.problem.in_size, 1)
        down, across = -(-high // self.rows), -(-wide // self.columns)
        return self.problem.batch * deep * down * across

    @cached_property
    def shares(self) -> int:
        """Blocks of a group: one wave."""
        places = self.hardware.multiprocessors * self.together
        return max(1, min(places // self.problem.groups, self.units))

    @property
    def blocks(self) -> int:
        return self.shares * self.problem.groups

    @cached_property
    def conflicts(self) -> float:
        """Lanes of the 8 pixels of a load that meet in a bank."""
        words = self.run * self.problem.stride[-1] * self.problem.element_bytes / 4
        if words < 1:
            return 1.0
        return max(1.0, 8 * gcd(32, int(words)) / 32)

    @cached_property
    def cycles(self) -> tuple[float, float, float]:
        """Of one unit on a multiprocessor: instructions, shared memory, and copies."""
        size = self.problem.element_bytes
        segments = -(-self.rows * self.columns // PIXELS)
        tiles = self.in_block // 8 // self.tile
        loads = 32 if size == 2 else 16
        one = (2.5 if size == 2 else 3) * loads + 5 * self.tile + 12
        stores = 8 * self.tile * (4 if self.run == 4 else 14)
        width = self.problem.out_size[-1]
        passes, copies = gather.copies(self.gy_lines, self.gy_pitch, width, size)
        work = segments * (tiles * (self.steps * one + stores) + SEGMENT_INSTRUCTIONS)
        rest = copies * COPY + passes * ROW_COPY + self.warps * UNIT_INSTRUCTIONS
        issue = (work + rest) / 4 / ISSUE
        shared = (
            segments * tiles * self.steps * (loads * self.conflicts + 2 * self.tile + 1)
            + 4 * copies
        )
        return issue, shared, self.gy_bytes / STAGED_BYTES

    @cached_property
    def microseconds(self) -> float:
        times = sorted(self.cycles)
        unit = times[2] + UNHIDDEN * (times[0] + times[1])
        longest = -(-self.units // self.shares)
        held = min(self.together, -(-self.blocks // self.hardware.multiprocessors))
        waves = -(-self.blocks // (self.hardware.multiprocessors * self.together))
        segments = -(-self.rows * self.columns // PIXELS)
        thin = float(max(1.0, FULL_WARPS / (held * min(self.warps, segments))) ** THIN)
        weights = self.in_block * self.steps * self.step
        rounds = -(-weights // (32 * self.warps * WEIGHTS_TOGETHER))
        setup = SETUP_CYCLES + WEIGHT_CYCLES * rounds
        busy = waves * (longest * (unit * held * thin + UNIT_CYCLES) + setup)
        rate = DRAM_SHARE * gather.DRAM_BYTES * self.hardware.multiprocessors
        memory = self.problem.bytes / rate
        whole = max(busy, memory) + UNHIDDEN * min(busy, memory)
        return whole / gather.CLOCK_MHZ + LAUNCH_MICROSECONDS

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"sums of {self.sum} products; a warp has {PIXELS} pixels x {8 * self.tile} channels,"
            f" {self.run} neighbouring pixels a thread",
            f"{self.blocks} blocks of {self.warps} warps, units of {self.rows} rows of"
            f" {self.columns} pixels, {self.shared_bytes / 1024:.3g} KiB of shared memory",
        )


def divisions(problem: Problem, hardware: Hardware) -> Iterator[Division]:
    """Every way to divide the work that is worth a look."""
    tiles = -(-problem.in_channels // problem.groups // 8)
    fitting = [t for t in TILES if t <= tiles]
    least = min(-(-tiles // t) * t for t in fitting)
    high, wide = three(problem.in_size, 1)[1:]
    whole = -(-wide // 16) * 16
    widths = sorted({whole} & set(range(16, 513, 16)) | {c for c in COLUMNS if c < whole})
    heights = [r for r in ROWS if r < 2 * high]
    for tile in fitting:
        if -(-tiles // tile) * tile > 1.3 * least:
            continue
        for warps, rows, columns, run in product(WARPS, heights, widths, RUNS):
            way = Division(problem, tile, warps, rows, columns, run, hardware)
            if legal(way):
                yield way


def legal(way: Division) -> bool:
    far = max(
        way.box.rows * way.box.row_step,
        three(way.problem.kernel, 1)[0] * three(way.problem.dilation, 1)[0],
    )
    return (
        way.weight_bytes <= MOST_WEIGHTS
        and way.shared_bytes <= min(way.hardware.shared_memory, gather.SHARED_BYTES)
        and way.rows * way.columns <= 32 * PIXELS
        and far < gather.FARTHEST
    )


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = gather.legality(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    one = Division(problem, 1, 4, 1, 16, 1, hardware)
    if one.weight_bytes > MOST_WEIGHTS:
        return Refusal(
            KERNEL,
            f"the weights of a group take {one.weight_bytes >> 10} KiB of shared memory:"
            f" more than {MOST_WEIGHTS >> 10}",
        )
    best = min(divisions(problem, hardware), key=lambda way: way.microseconds, default=None)
    if best is None:
        return Refusal(KERNEL, "no unit of this layer fits into shared memory")
    return Candidate(KERNEL, best.microseconds, record(best), best.notes)


def scalar_fields(way: Division) -> dict[str, int]:
    """The scalars of csrc/cuda/gather_params.h by name, in its order."""
    problem = way.problem
    return {
        "type": OPERANDS[problem.dtype],
        "by_weight": 0,
        "by_input": 1,
        "tiles_m": PIXELS // 16,
        "tiles_n": way.tile,
        "warps_m": way.warps,
        "warps_n": 1,
        "warps_k": 1,
        **gather.common_fields(problem),
        "step_z": 1,
        "step_y": 1,
        "rows": way.rows,
        "columns": way.columns,
        "run": way.run,
        "out_block": problem.out_channels // problem.groups,
        "in_block": way.in_block,
        "tap_block": problem.kernel[-1],
        "gy_rows": way.box.rows,
        "gy_plane_step": way.box.plane_step,
        "gy_row_step": way.box.row_step,
        "gy_tap_rows": way.box.tap_rows,
        "gy_row_advance": way.box.row_advance,
        "gy_pitch": way.gy_pitch,
        "gy_vector": gather.copy_bytes(problem.out_size[-1], problem.element_bytes),
        "x_rows": 0,
        "x_plane_step": 0,
        "x_tap_rows": 0,
        "x_pitch": 0,
        "x_vector": problem.element_bytes,
        "gy_bytes": way.gy_bytes,
        "x_bytes": 0,
        "table_bytes": way.table_bytes,
        "shared_bytes": way.shared_bytes,
        "blocks": way.blocks,
        "jobs": 1,
    }


def record(way: Division) -> tuple[int, ...]:
    problem = way.problem
    kernel, padding = three(problem.kernel, 1), three(problem.padding, 0)
    deep, high, _ = three(problem.in_size, 1)
    taps = 0, kernel[0], 0, kernel[1]
    places = -padding[0], -padding[1], 0, 0
    job = Job(0, way.shares, *taps, *places, deep, high, way.units)
    return gather.record(scalar_fields(way), (job,))
