"""The mma.sync kernel for few output channels: when it may serve, how it is divided, its cost.

csrc/cuda/overlap_fprop.cuh tells the idea, overlap_columns.py what its product's columns are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import gcd, prod

from . import gather
from .candidate import Candidate, Refusal
from .legality import first_refusal
from .operands import OPERANDS, SPLIT
from .overlap_columns import Axis, Columns, axes_of, columns_of
from .problem import Hardware, Problem, three

KERNEL = "overlap_fprop"

BOX_TILES = ((4, 1), (4, 2), (4, 3), (4, 4), (3, 2), (3, 3), (3, 4), (2, 4), (2, 8))
COPY_TILES = ((4, 2), (4, 4), (2, 8))
SPLIT_TILES = ((4, 1), (2, 2), (2, 4))
"""Pixels in 16s and columns in 8s of a warp: where the TMA brings boxes, where copies do, and where
float32 must not be rounded. The kernel is compiled for these."""
MOST_COLUMNS = 64
BOXES_FROM = (9, 0)
"""Compute capability that has the TMA."""
MOST_BOX = 256
"""Of a box, along each dimension."""
WARPS = (4, 8, 16)
STAGES = (2, 3)
STEPS = (1, 2, 4)
MOST_SHIFTS = MOST_SUMS = MOST_PHASES = 64
MOST_GROUPS = 65535
"""What a launch can have along its second dimension."""
MOST_WEIGHTS = 96 * 1024
"""Bytes of a group's weights in shared memory."""
REGISTERS = 128
"""Of a thread."""

LAUNCH_MICROSECONDS = 9.187
SETUP_CYCLES = 1072.0
PRODUCT_CYCLES = 0.3027
"""Of a multiprocessor, for one mma.sync of 16 rows."""
COPY, ROW_COPY = 16.02, 24.31
"""Instructions of a warp for one copy of all its lanes, and for each row that these are of."""
BOX_INSTRUCTIONS, UNIT_INSTRUCTIONS = 87.3, 55.79
PASS_INSTRUCTIONS, PASS_COLUMN = 23.94, 17.51
"""Of laying down some columns, and of asking of each whether it is one of them."""
ADD, ADD_TAP = 15.53, 12.74
"""Of an output, and of each tap of the width that it has."""
ISSUE = 0.7597
"""Share of the issue slots that are used."""
FULL_WARPS, THIN = 16, 0.6073
"""Warps that fill a multiprocessor, and the power of what is missing of these that a unit takes
longer by."""
BOX_CYCLES = 532.4
"""Of every box, with none on its way beside it: what nothing hides."""
STAGED_BYTES, CACHE_BYTES = 76.58, 19.32
"""A cycle and multiprocessor, from the second-level cache: as one multiprocessor could have them,
and as all together can."""
UNHIDDEN = 0.281

# Fitted to runs of 27 layers in three types on an H200 (so that a product, which other work hides,
# comes out cheaper than it is). Of 2,248 runs measured later, among them tiles of 48 pixels, it
# is off by 8.5 % (standard deviation); what it picks takes 3.4 % more than the fastest, on average
# (benchmarks/measure_overlap.py).


@dataclass(frozen=True)
class Division:
    """A way to divide the work."""

    problem: Problem
    columns: Columns
    axes: tuple[Axis, Axis, Axis]
    boxes: bool
    tiles_m: int
    tiles_n: int
    warps: int
    warps_x: int
    stages: int
    steps: int
    together: int
    hardware: Hardware

    # --- one warp

    @property
    def element(self) -> int:
        return self.problem.element_bytes

    @property
    def pixels(self) -> int:
        return 16 * self.tiles_m

    @property
    def valid(self) -> int:
        """Places whose taps are all among a warp's pixels, in whole copies of 16 bytes."""
        each = 16 // self.element
        return (self.pixels - self.axes[2].margin) // each * each

    @property
    def channels(self) -> int:
        """Of a box."""
        return self.steps * 32 // self.element

    @property
    def chunks(self) -> int:
        return -(-(self.problem.in_channels // self.problem.groups) // self.channels)

    @property
    def sum_pitch(self) -> int:
        """Floats; what is written together lies on different banks."""
        return self.pixels + 4

    @cached_property
    def lines(self) -> tuple[int, ...]:
        """Of each sum, where it lies among the columns that are laid down together."""
        columns = [s.column for s in self.columns.sums]
        firsts = [columns[i - i % self.together] for i in range(len(columns))]
        return tuple(c if c < 0 else c - f for c, f in zip(columns, firsts, strict=True))

    @property
    def sum_rows(self) -> int:
        """Columns of the product that a warp lays down at a time."""
        return max(max(self.lines) + self.problem.kernel[-1], 1)

    # --- a block

    @property
    def block_rows(self) -> int:
        return self.warps // self.warps_x

    @property
    def box_rows(self) -> int:
        return self.block_rows + self.axes[1].margin

    @property
    def planes(self) -> int:
        return 1 + self.axes[0].margin

    @property
    def box_columns(self) -> int:
        return (self.warps_x - 1) * self.valid + self.pixels

    @property
    def pitch(self) -> int:
        """Elements; the rows that a load meets lie on different banks."""
        if self.element == 2:
            return gather.pitch(self.box_columns, 2, 32, 16)
        return gather.pitch(self.box_columns, 4, 64, 32)

    @property
    def box_lines(self) -> int:
        return self.planes * self.box_rows * self.channels

    @property
    def box_bytes(self) -> int:
        return -(-self.box_lines * self.pitch * self.element // 128) * 128

    @property
    def weight_bytes(self) -> int:
        return self.chunks * len(self.columns.shifts) * self.steps * self.tiles_n * 256

    @cached_property
    def shared_bytes(self) -> int:
        sums = self.warps * (self.sum_rows * self.sum_pitch * 4 + 16 * len(self.columns.sums))
        lines = self.box_lines * (not self.boxes)
        tables = 8 * (len(self.columns.shifts) * self.steps + 2 * self.stages + lines)
        return self.stages * self.box_bytes + self.weight_bytes + sums + tables

    # --- all blocks

    @property
    def first_x(self) -> int:
        """The first tile's first column, from which copies of 16 bytes begin."""
        each = 16 // self.element
        return self.axes[2].low // each * each

    @property
    def tiles_x(self) -> int:
        x = self.axes[2]
        return -(-(x.count + x.low - self.first_x) // (self.valid * self.warps_x))

    @property
    def store(self) -> int:
        """Neighbouring outputs of a row that a lane stores at a time."""
        stride, width = self.problem.stride[-1], self.problem.out_size[-1]
        return next(n for n in (4, 2, 1) if stride % n == width % n == 0)

    @cached_property
    def units(self) -> int:
        z, y, _ = self.axes
        return self.problem.batch * z.count * -(-y.count // self.block_rows) * self.tiles_x

    @cached_property
    def blocks_held(self) -> int:
        """Blocks that a multiprocessor holds."""
        by_memory = gather.SHARED_BYTES // (self.shared_bytes + 1024)
        return max(1, min(by_memory, 65536 // (REGISTERS * 32 * self.warps)))

    @cached_property
    def shares(self) -> int:
        """Blocks of a group: one wave."""
        places = self.hardware.multiprocessors * self.blocks_held
        return max(1, min(-(-places // self.problem.groups), self.units))

    # --- the cost

    @cached_property
    def products(self) -> int:
        """Of a warp, for one step of K over all shifts."""
        used = sum(bin(shift.tiles).count("1") for shift in self.columns.shifts)
        return used * self.tiles_m

    @cached_property
    def cycles(self) -> tuple[float, float, float]:
        """Of one unit on a multiprocessor: instructions, products, and copies."""
        m, n, shifts, strict = self.tiles_m, self.tiles_n, self.columns.shifts, self.problem.strict
        loads = 2 * m if self.element == 4 else m
        prepare = 4 * m * (3 if strict else 2 * (not self.boxes)) * (self.element == 4)
        used = self.products / m
        step = len(shifts) * (loads + prepare + 8) + used * (2 + m * (7 if strict else 1))
        step += (len(shifts) - self.columns.shifts_all) * 2 * n
        box = BOX_INSTRUCTIONS
        if not self.boxes:
            width = self.problem.in_size[-1]
            passes, copies = gather.copies(self.box_lines, self.box_columns, width, self.element)
            box += (copies * COPY + passes * ROW_COPY) / self.warps
        taps = max(len(phase) for phase in self.axes[2].phases)
        outputs = -(-self.pixels // 32) * self.problem.stride[-1]
        each = ADD / self.store + (ADD_TAP + (taps > 3) * 4) * taps
        adding = len(self.columns.sums) * (15 + outputs * each)
        passes = -(-len(self.columns.sums) // self.together)
        laid = 2 * n * (PASS_COLUMN * passes + m * (1 if self.element == 4 else 2))
        laid += PASS_INSTRUCTIONS * passes
        warp = self.chunks * (self.steps * step + box) + adding + laid + UNIT_INSTRUCTIONS
        products = self.chunks * self.steps * self.products * (3 if strict else 1)
        return (
            self.warps * warp / 4 / ISSUE,
            self.warps * products * PRODUCT_CYCLES,
            self.chunks * self.box_lines * self.pitch * self.element / STAGED_BYTES,
        )

    @cached_property
    def microseconds(self) -> float:
        times = sorted(self.cycles)
        unit = times[2] + UNHIDDEN * (times[0] + times[1])
        blocks = self.shares * self.problem.groups
        places = self.hardware.multiprocessors * self.blocks_held
        held = min(self.blocks_held, -(-blocks // self.hardware.multiprocessors))
        waves = -(-blocks // places)
        longest = -(-self.units // self.shares)
        thin = float(max(1.0, FULL_WARPS / (held * self.warps)) ** THIN)
        lone = unit * held * thin + self.chunks * BOX_CYCLES / (self.stages - 1)
        busy = waves * (longest * lone + SETUP_CYCLES)
        machine = self.hardware.multiprocessors
        staged = self.box_lines * self.pitch * self.element * self.chunks * self.units
        memory = max(
            self.problem.bytes / (gather.DRAM_BYTES * machine),
            staged * self.problem.groups / (CACHE_BYTES * machine),
        )
        whole = max(busy, memory) + UNHIDDEN * min(busy, memory)
        return whole / gather.CLOCK_MHZ + LAUNCH_MICROSECONDS

    @property
    def notes(self) -> tuple[str, ...]:
        sums = sum(s.column >= 0 for s in self.columns.sums)
        return (
            f"{sums} sums (output channels, phases of depth and height) x"
            f" {self.problem.kernel[-1]} taps of the width in {8 * self.tiles_n} columns; a warp"
            f" has {self.pixels} pixels, of which {self.valid} are complete",
            f"{self.shares * self.problem.groups} blocks of {self.block_rows} rows x"
            f" {self.warps_x} warps, {self.stages} boxes of {self.channels} channels by"
            f" {'TMA' if self.boxes else 'copies'}, {self.shared_bytes / 1024:.3g} KiB of shared"
            " memory",
        )


def legality(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = first_refusal(problem, hardware, OPERANDS)
    if reason:
        return reason
    each = problem.out_channels // problem.groups
    stride = three(problem.stride, 1)
    columns = each * stride[0] * stride[1] * problem.kernel[-1]
    if columns > 4 * MOST_COLUMNS or each * stride[0] * stride[1] > MOST_SUMS:
        return f"{columns} output channels x phases x taps of the width: for other kernels"
    if stride[2] > MOST_PHASES:
        return f"stride {stride[2]} of the width: covers up to {MOST_PHASES}"
    if problem.groups > MOST_GROUPS:
        return f"{problem.groups} groups: covers up to {MOST_GROUPS}"
    channels = [c // problem.groups for c in (problem.in_channels, problem.out_channels)]
    planes = (channels[0] + 1) * prod(problem.in_size), (channels[1] + 1) * prod(problem.out_size)
    if max(planes) >= 1 << 31:
        return "the channels of a group have 2^31 elements or more"
    widest = max(n * s + k * d + p for n, k, s, p, _, d in problem.dimensions)
    places = problem.batch * prod(problem.out_size) + prod(problem.padding)
    if max(widest, places, prod(problem.kernel) * channels[1] * channels[0]) >= 1 << 30:
        return "2^30 outputs or taps, or more"
    return None


def by_boxes(problem: Problem, hardware: Hardware) -> bool:
    """Can the TMA bring the input? Rows must begin on 16 bytes."""
    whole = problem.in_size[-1] * problem.element_bytes % 16 == 0
    return whole and hardware.capability >= BOXES_FROM


def divisions(problem: Problem, hardware: Hardware) -> Iterator[Division]:
    """Every way to divide the work that is worth a look."""
    columns, axes, boxes = columns_of(problem), axes_of(problem), by_boxes(problem, hardware)
    if len(columns.shifts) > MOST_SHIFTS:
        return
    tiles: tuple[tuple[int, int], ...] = BOX_TILES if boxes else COPY_TILES
    if problem.strict:
        tiles = SPLIT_TILES if boxes else ()
    fitting = [(m, n) for m, n in tiles if n >= columns.tiles]
    least = min((n for _, n in fitting), default=0)
    sums = len(columns.sums)
    togethers = sorted({sums, -(-sums // 2), -(-sums // 4)})
    for m, n in fitting:
        if n > least and m > 2:
            continue
        for warps, stages, steps, together in product(WARPS, STAGES, STEPS, togethers):
            for warps_x in (1, 2, 4, 8):
                if warps_x > warps:
                    continue
                numbers = m, n, warps, warps_x, stages, steps, together
                way = Division(problem, columns, axes, boxes, *numbers, hardware)
                if legal(way):
                    yield way


def legal(way: Division) -> bool:
    channels = way.problem.in_channels // way.problem.groups
    return (
        way.valid > 0
        and (way.steps == 1 or channels > way.channels // 2)
        and (way.block_rows == 1 or way.block_rows < 2 * way.axes[1].count)
        and way.weight_bytes <= MOST_WEIGHTS
        and way.shared_bytes <= min(way.hardware.shared_memory, gather.SHARED_BYTES - 1024)
        and max(way.box_rows, way.planes) < gather.FARTHEST
        and way.channels * prod(way.problem.in_size) < 1 << 31
        and (not way.boxes or max(way.pitch, way.box_rows, way.planes) <= MOST_BOX)
    )


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = legality(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    if problem.strict and not by_boxes(problem, hardware):
        return Refusal(KERNEL, "float32 that must not be rounded needs rows that begin on 16 bytes")
    best = min(divisions(problem, hardware), key=lambda way: way.microseconds, default=None)
    if best is None:
        columns = 8 * columns_of(problem).tiles
        return Refusal(KERNEL, f"{columns} columns of products, or weights and boxes: too many")
    return Candidate(KERNEL, best.microseconds, record(best), best.notes)


def scalar_fields(way: Division) -> dict[str, int]:
    """The scalars of csrc/cuda/overlap_params.h by name, in its order."""
    problem, (z, y, x) = way.problem, way.axes
    padding, dilation = three(problem.padding, 0), three(problem.dilation, 1)
    common = gather.common_fields(problem)
    del common["padding_x"], common["dilation_x"]
    apart = gcd(problem.stride[-1], problem.dilation[-1])
    return {
        "type": SPLIT if problem.strict else OPERANDS[problem.dtype],
        "boxes": int(way.boxes),
        "tiles_m": way.tiles_m,
        "tiles_n": way.tiles_n,
        "warps": way.warps,
        "warps_x": way.warps_x,
        "stages": way.stages,
        "steps": way.steps,
        "together": way.together,
        **common,
        "padding_z": padding[0],
        "padding_y": padding[1],
        "dilation_z": dilation[0],
        "dilation_y": dilation[1],
        "low_z": z.low,
        "planes": way.planes,
        "low_y": y.low,
        "box_rows": way.box_rows,
        "low_x": x.low,
        "box_columns": way.box_columns,
        "pitch": way.pitch,
        "vector": gather.copy_bytes(problem.in_size[-1], problem.element_bytes),
        "first_z": z.first,
        "count_z": z.count,
        "first_y": y.first,
        "count_y": y.count,
        "first_x": way.first_x,
        "tiles_x": way.tiles_x,
        "valid": way.valid,
        "sum_pitch": way.sum_pitch,
        "sum_rows": way.sum_rows,
        "tap_pitch": problem.stride[-1] // apart * way.sum_pitch - problem.dilation[-1] // apart,
        "most_taps": max(len(phase) for phase in x.phases),
        "store": way.store,
        "box_bytes": way.box_bytes,
        "weight_bytes": way.weight_bytes,
        "shared_bytes": way.shared_bytes,
        "shares": way.shares,
        "shifts": len(way.columns.shifts),
        "shifts_all": way.columns.shifts_all,
        "sums": len(way.columns.sums),
        "phases": len(x.phases),
    }


def record(way: Division) -> tuple[int, ...]:
    """The plan as integers, in the order of csrc/cuda/overlap_params.h."""
    shifts = [value for s in way.columns.shifts for value in (s.z, s.y, s.tiles)]
    sums = [
        value
        for s, line in zip(way.columns.sums, way.lines, strict=True)
        for value in (s.channel, s.z, s.y, s.column, line)
    ]
    phases = []
    x = way.axes[2]
    for taps in x.phases:
        place = taps[0][0] * way.sum_pitch + taps[0][1] - x.low if taps else 0
        phases += [place, len(taps)]
    return (*scalar_fields(way).values(), *shifts, *sums, *phases)
