"""What the Hopper kernel computes, whatever direction of the operator it comes from.

A `Task` is one lattice for each of depth, rows and columns, and where the weight of a tap lies. A
`Shape` lays it out for the kernel:

    folds   depths, row phases and width phases, stacked in a block of 64 rows, where few output
            channels would leave it empty
    lanes   neighbouring output rows that share their taps, made row phases so that they can be
            folded; the input rows that only some of them read lie in the same tile. Depths alike:
            the planes of all of them are loaded once
    fills   depths and rows that no tap reaches: the bias is written there before
    planes  input pixels that one tile in shared memory holds: (depth, rows, columns) offsets from
            the tile's own coordinates. With an input step, taps whose shifts differ by less than a
            step read other pixels altogether; each residue of the shift is a plane of its own, and
            so is each depth. Inside a plane taps differ by whole pixels of the tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from .lattice import Lattice
from .problem import ELEMENT_BYTES, Problem

Triple = tuple[int, int, int]
Taps = tuple[tuple[int, int], ...]
"""(rows, columns) in their plane of the taps that any fold has."""
WARP_ROWS = 16
"""Rows of a block that one warp stores: a line's width phases are among them."""
BLOCK_WARPS = 4
MAX_WIDTH_PHASES, MAX_ROW_PHASES = 16, 64
"""That have taps, as in csrc/cuda/sm90_params.h."""
MAX_KINDS, MAX_PAIRS = 32, 1024
"""Of all jobs, and of all their tap lists; as there."""
MAX_SHIFT = 2**15 - 1
SHORT_ROW = 1024
"""Bytes of an output row below which rows without taps are not filled by themselves: they share too
many sectors with rows that are written at another time."""
WIDE_ROW = 128
"""Lattice points of a row from which on a tile is one row high, or might as well be."""
LINE_BYTES = 16 * 288 - 16 * 16
"""Of a warp's staging slice, for its lines (csrc/cuda/sm90_lines.cuh)."""


@dataclass(frozen=True)
class Task:
    """Depth, rows and columns in this order; channels are those of one group."""

    batch: int
    groups: int
    in_channels: int
    out_channels: int
    in_size: Triple
    out_size: Triple
    kernel: Triple
    lattices: tuple[Lattice, Lattice, Lattice]
    weight_in: int
    """Elements of the weight from one input channel to the next."""
    weight_out: int
    weight_group: int
    dtype: str
    split: bool
    """float32 that must not be rounded to TF32: each number is the sum of two of 16 bits."""
    channels_last: bool
    bias: bool

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def block_channels(self) -> int:
        """Of a channel block, 16 bytes of a pixel as the tensor core gets it."""
        return 8 if self.split else 16 // self.element_bytes

    @property
    def channel_blocks(self) -> int:
        """Two make a product."""
        return 2 * -(-self.in_channels // (2 * self.block_channels))

    @property
    def inputs(self) -> int:
        return self.batch * self.groups * self.in_channels * prod(self.in_size)

    @property
    def outputs(self) -> int:
        return self.batch * self.groups * self.out_channels * prod(self.out_size)

    @cached_property
    def fills(self) -> tuple[int, int]:
        """Residues of depths and of rows that no tap reaches, as bits, where the kernel fills them
        without any unit of work."""
        masks = [
            sum(1 << i for i, taps in enumerate(lattice.taps) if not taps)
            for lattice in self.lattices[:2]
        ]
        none = any(not any(lattice.taps) for lattice in self.lattices)
        steps = max(lattice.out_step for lattice in self.lattices[:2])
        lines = self.batch * self.groups * self.out_channels * prod(self.out_size[:2])
        if self.channels_last or none or steps > 31 or lines >= 2**31:
            return 0, 0
        return masks[0], masks[1]

    @property
    def fill_first(self) -> bool:
        """Fill the whole output before anything else is written, rather than the rows alone?"""
        return any(self.fills) and self.out_size[2] * self.element_bytes < SHORT_ROW

    @cached_property
    def filled(self) -> float:
        """Share of the output that is filled."""
        computed = 1.0
        for mask, lattice in zip(self.fills, self.lattices, strict=False):
            reached = sum(
                -(-(lattice.size - first) // lattice.out_step)
                for i, first in enumerate(lattice.firsts)
                if not mask >> i & 1
            )
            computed *= reached / lattice.size
        return 1 - computed

    @property
    def bytes(self) -> int:
        """Least traffic: input and weight read once, output written once."""
        w = self.groups * self.in_channels * self.out_channels * prod(self.kernel)
        b = self.groups * self.out_channels if self.bias else 0
        return (self.inputs + w + self.outputs + b) * self.element_bytes


def padded(sizes: tuple[int, ...]) -> Triple:
    """Sizes of 1 to 3 dimensions as depth, rows and columns."""
    depth, rows, columns = (1,) * (3 - len(sizes)) + sizes
    return depth, rows, columns


def forward_task(problem: Problem) -> Task:
    lattices = tuple(Lattice.of(problem, i) for i in range(problem.ndim))
    taps = prod(problem.kernel)
    in_channels = problem.in_channels // problem.groups
    out_channels = problem.out_channels // problem.groups
    depth, rows, columns = (Lattice.point(),) * (3 - problem.ndim) + lattices
    return Task(
        batch=problem.batch,
        groups=problem.groups,
        in_channels=in_channels,
        out_channels=out_channels,
        in_size=padded(problem.in_size),
        out_size=padded(problem.out_size),
        kernel=padded(problem.kernel),
        lattices=(depth, rows, columns),
        weight_in=out_channels * taps,
        weight_out=taps,
        weight_group=in_channels * out_channels * taps,
        dtype=problem.dtype,
        split=problem.strict,
        channels_last=problem.channels_last,
        bias=problem.bias,
    )


def input_gradient_task(problem: Problem) -> Task:
    """The gradient of the input: reads grad_output, writes grad_input, with the same weight."""
    lattices = tuple(Lattice.of_input_gradient(problem, i) for i in range(problem.ndim))
    depth, rows, columns = (Lattice.point(),) * (3 - problem.ndim) + lattices
    forward = forward_task(problem)
    return Task(
        batch=forward.batch,
        groups=forward.groups,
        in_channels=forward.out_channels,
        out_channels=forward.in_channels,
        in_size=forward.out_size,
        out_size=forward.in_size,
        kernel=forward.kernel,
        lattices=(depth, rows, columns),
        weight_in=forward.weight_out,
        weight_out=forward.weight_in,
        weight_group=forward.weight_group,
        dtype=forward.dtype,
        split=forward.split,
        channels_last=forward.channels_last,
        bias=False,
    )


@dataclass(frozen=True)
class Kind:
    """The taps of one depth phase and of the row and width phases folded into a block of 64 rows,
    by plane."""

    first_z: int
    row: int
    """First of its row phases, among those of the shape."""
    first_x: tuple[int, ...]
    taps: tuple[tuple[Triple, Taps], ...]

    @cached_property
    def planes(self) -> dict[Triple, Taps]:
        return dict(self.taps)


@dataclass(frozen=True)
class Residues:
    """The shifts of one dimension by their residue modulo the input step."""

    step: int
    low: dict[int, int]
    """Residue -> its least shift, which is the offset of its planes."""
    high: dict[int, int]
    """Residue -> greatest distance from there, in steps."""

    @staticmethod
    def of(lattice: Lattice, step: int) -> Residues:
        low: dict[int, int] = {}
        high: dict[int, int] = {}
        shifts = sorted({tap.shift for taps in lattice.taps for tap in taps})
        for shift in shifts or [0]:
            residue = shift % step
            high[residue] = (shift - low.setdefault(residue, shift)) // step
        return Residues(step, low, high)

    def place(self, shift: int) -> tuple[int, int]:
        """Offset of the plane, and the distance from there in steps."""
        low = self.low[shift % self.step]
        return low, (shift - low) // self.step

    @property
    def most(self) -> int:
        return max(self.high.values())

    def pitch(self, count: int, size: int, back: int) -> int:
        """From one row of `count` points to the next where these are all points there are: zeros
        after one row are those before the next as well. The row begins `back` steps early."""
        alone = count + self.most + back
        shared = count
        for residue, low in self.low.items():
            before = max(-(low // self.step) + back, 0)
            after = -(-(size - low) // self.step) + back
            shared = max(shared, after, count + self.high[residue] + back - before)
        return min(alone, shared)


@dataclass(frozen=True)
class Shape:
    """A task with its folds: everything that does not depend on the tiling."""

    task: Task
    lanes: int
    folds: int
    """Depths times row phases of a block."""
    fold_rows: int
    """Output channels of each."""
    width_folds: int = 1
    """Width phases of a block."""
    depth_lanes: int = 1
    """Depths of a block."""

    @cached_property
    def rows(self) -> Lattice:
        return self.task.lattices[1].stacked(self.lanes)

    @property
    def row_folds(self) -> int:
        return self.folds // self.depth_lanes

    @cached_property
    def depth(self) -> Lattice:
        return self.task.lattices[0].stacked(self.depth_lanes)

    @property
    def columns(self) -> Lattice:
        return self.task.lattices[2]

    @property
    def steps(self) -> Triple:
        """Input step of each dimension, lanes of rows not counted."""
        _, rows, columns = (lattice.in_step for lattice in self.task.lattices)
        return self.depth.in_step, rows, columns

    @cached_property
    def row_residues(self) -> Residues:
        return Residues.of(self.rows, self.steps[1])

    @cached_property
    def column_residues(self) -> Residues:
        return Residues.of(self.columns, self.steps[2])

    @cached_property
    def row_phases(self) -> tuple[int, ...]:
        """The row phases that units of work compute, by their number in `rows`."""
        return computed(self.rows, any(self.task.fills))

    @cached_property
    def width_phases(self) -> tuple[int, ...]:
        """The width phases that have taps."""
        return computed(self.columns, True)

    @property
    def line_columns(self) -> int:
        """Accumulator columns that a warp can stage at a time as lines of the output."""
        room, step = self.line_room, self.columns.out_step
        # One vector is left where lines are shifted.
        columns = ((room - self.whole) // step // 8 or room // step // 8) * 8
        one_block = len(self.width_phases) <= self.width_folds
        return columns // 32 * 32 if one_block and columns > 32 else columns

    @property
    def whole(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.task.element_bytes

    @property
    def shifts(self) -> bool:
        """Do rows not begin on 16 bytes, and is there room for lines which are staged so far from
        there as they lie in the output?"""
        used = self.line_columns * self.columns.out_step
        odd = self.task.out_size[2] % self.whole != 0
        channels = self.folds == 1 or self.fold_rows % self.warp_lines == 0  # of a warp's lines
        return odd and channels and used + self.whole <= self.line_room

    @property
    def line_room(self) -> int:
        """Elements of a staged line at most."""
        return LINE_BYTES // self.task.element_bytes // self.warp_lines

    @property
    def line_pitch(self) -> int:
        """From one staged line to the next: vectors begin on 16 bytes, lines in different banks
        where there is room."""
        whole = self.whole
        pitch = -(-self.line_columns * self.columns.out_step // whole) * whole
        pitch += whole if self.shifts else 0
        apart = pitch % (4 * whole) == 0 and pitch + whole <= self.line_room
        return pitch + whole if apart else pitch

    def blocks(self, together: bool) -> tuple[tuple[Kind, ...], ...]:
        """[depth phase and row phases of a block][block]. `together`: blocks of all width phases
        that have taps; else one for each width phase."""
        folds = self.row_folds
        groups = [self.row_phases[i : i + folds] for i in range(0, len(self.row_phases), folds)]
        phases = self.width_phases if together else tuple(range(len(self.columns.firsts)))
        widths = [phases[i : i + self.width_folds] for i in range(0, len(phases), self.width_folds)]
        return tuple(
            tuple(self._kind(z, i * folds, group, width) for width in widths)
            for z in computed(self.task.lattices[0], any(self.task.fills))
            for i, group in enumerate(groups)
        )

    def _kind(self, z: int, row: int, group: tuple[int, ...], width: tuple[int, ...]) -> Kind:
        """`z`: a depth phase, of which the block has all lanes."""
        planes: dict[Triple, set[tuple[int, int]]] = {}
        lanes = range(z, len(self.depth.firsts), len(self.task.lattices[0].firsts))
        for lane, y, x in product(lanes, group, width):
            lists = self.depth.taps[lane], self.rows.taps[y], self.columns.taps[x]
            for tz, ty, tx in product(*lists):
                plane_y, at_y = self.row_residues.place(ty.shift)
                plane_x, at_x = self.column_residues.place(tx.shift)
                planes.setdefault((tz.shift, plane_y, plane_x), set()).add((at_y, at_x))
        return Kind(
            self.depth.firsts[z],
            row,
            tuple(self.columns.firsts[x] for x in width),
            tuple((plane, tuple(sorted(taps))) for plane, taps in sorted(planes.items())),
        )

    def kind_count(self, together: bool) -> int:
        """How many kinds `blocks` has: 640,000 of them took a minute to list."""
        phases = len(self.width_phases if together else self.columns.firsts)
        depths = len(computed(self.task.lattices[0], any(self.task.fills)))
        rows = -(-len(self.row_phases) // self.row_folds)
        return depths * rows * -(-phases // self.width_folds)

    @property
    def fits(self) -> bool:
        """Have the tables room for one of the ways to make blocks?"""
        phases = len(self.width_phases)
        together = 0 < phases <= MAX_WIDTH_PHASES and not self.task.channels_last
        return (
            len(self.row_phases) <= MAX_ROW_PHASES
            and min(map(self.kind_count, {False, together})) <= MAX_KINDS
        )

    @property
    def warp_lines(self) -> int:
        """Lines (an output row of one channel) that a warp holds with all their width phases."""
        return WARP_ROWS // self.width_folds

    @property
    def by_lines(self) -> bool:
        """Stored by lines: folds that no warp has to itself, many width phases, or wide rows of two
        that begin anywhere in 16 bytes."""
        span = self.columns.out_step
        odd = span == 2 and self.columns.count >= WIDE_ROW and self.shifts
        return self.width_folds > 1 or self.fold_rows % WARP_ROWS != 0 or span > 2 or odd

    @property
    def channel_blocks(self) -> int:
        return 1 if self.folds > 1 else -(-self.task.out_channels // self.fold_rows)

    @cached_property
    def products(self) -> float:
        """Taps that 64 rows are multiplied with, for each output row of the lattice."""
        together = not self.task.channels_last and bool(self.width_phases)
        taps = [len(taps) for group in self.blocks(together) for k in group for _, taps in k.taps]
        return sum(taps) * self.channel_blocks / (self.lanes * self.depth_lanes)


def computed(lattice: Lattice, filled: bool) -> tuple[int, ...]:
    """The phases of a lattice that units of work compute: where the others are filled, those that
    have taps."""
    return tuple(i for i, taps in enumerate(lattice.taps) if taps or not filled)


def shapes(task: Task) -> list[Shape]:
    """The ways to lay the task out: folded when few output channels would leave rows empty."""
    if any(abs(t.shift) > MAX_SHIFT for each in task.lattices for taps in each.taps for t in taps):
        return []
    # The taps of one phase, two channel blocks in a pair.
    if prod(max(map(len, lattice.taps)) for lattice in task.lattices) > 2 * MAX_PAIRS:
        return []
    result = list(warp_shapes(task))
    result += () if task.channels_last else line_shapes(task)
    result += [deep for shape in result for deep in depth_shapes(shape)]
    result = [shape for shape in result if shape.fits]
    # A shape that multiplies much more than another is never the fastest, and planning it is slow.
    least = min((shape.products for shape in result), default=0.0)
    return [shape for shape in result if shape.folds == 1 or shape.products <= MOST_MORE * least]


MOST_MORE = 1.5


def warp_shapes(task: Task) -> Iterator[Shape]:
    """Folds of whole warps: 16, 32 or 64 channels."""
    phases = len(computed(task.lattices[1], any(task.fills)))
    for folds in (1, 2, 4):
        if folds == 1 or task.out_channels <= 64 // folds:
            lanes = 1 if phases >= folds or folds % phases else folds // phases
            yield Shape(task, lanes, folds, 64 // folds)


def line_shapes(task: Task) -> Iterator[Shape]:
    """Folds of as many channels as there are, and of width phases; stored by lines."""
    phases = len(computed(task.lattices[1], any(task.fills)))
    width_phases = len(computed(task.lattices[2], True))
    if width_phases > MAX_WIDTH_PHASES:
        return
    for width_folds in sorted({-(-width_phases // blocks) for blocks in (1, 2, 3, 4)} - {0}):
        lines = BLOCK_WARPS * (WARP_ROWS // width_folds)
        channels = min(task.out_channels, lines)
        most = lines // channels if task.out_channels <= lines else 1
        if width_folds == 1 and channels % WARP_ROWS == 0:
            continue
        if most <= phases:
            yield Shape(task, 1, most, channels, width_folds)
            continue
        lanes = {max(most // phases // part, 1) for part in (1, 2, 4, 8)}
        for count in sorted(lane for lane in lanes if lane <= task.lattices[1].count):
            yield Shape(task, count, count * phases, channels, width_folds)


def depth_shapes(shape: Shape) -> Iterator[Shape]:
    """The same with some of its lanes along depth. Rows of all lanes lie in one tile and make it
    large; the planes of a depth come one after another."""
    task = shape.task
    for depths in range(2, shape.lanes + 1):
        whole = shape.lanes % depths == 0 and depths <= task.lattices[0].count
        if whole and not any(task.fills):
            yield replace(shape, lanes=shape.lanes // depths, depth_lanes=depths)
