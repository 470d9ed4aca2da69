"""What the Hopper kernel computes, whatever direction of the operator it comes from.

A `Task` is one lattice for each of depth, rows and columns, and where the weight of a tap lies. A
`Shape` lays it out for the kernel:

    folds   row phases stacked in a block of 64 rows, where few output channels would leave it empty
    lanes   neighbouring output rows that share their taps, made row phases so that they can be
            folded; the input rows that only some of them read lie in the same tile
    planes  input pixels that one tile in shared memory holds: (depth, rows, columns) offsets from
            the tile's own coordinates. With an input step, taps whose shifts differ by less than a
            step read other pixels altogether; each residue of the shift is a plane of its own, and
            so is each depth. Inside a plane taps differ by whole pixels of the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from .lattice import Lattice
from .problem import ELEMENT_BYTES, Problem

Triple = tuple[int, int, int]
Taps = tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
"""(rows, columns) of the tap in its plane, and the weight position of each fold, -1 for none."""


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
    """float32 that must not be rounded to TF32: each number is the sum of two such."""
    channels_last: bool
    bias: bool

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def outputs(self) -> int:
        return self.batch * self.groups * self.out_channels * prod(self.out_size)

    @property
    def bytes(self) -> int:
        """Least traffic: input and weight read once, output written once."""
        x = self.batch * self.groups * self.in_channels * prod(self.in_size)
        w = self.groups * self.in_channels * self.out_channels * prod(self.kernel)
        b = self.groups * self.out_channels if self.bias else 0
        return (x + w + self.outputs + b) * self.element_bytes


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
        split=problem.dtype == "float32" and not problem.tf32,
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
    """The taps of one depth and width phase and of the row phases folded into a block of 64 rows,
    by plane."""

    first_z: int
    first_x: int
    first_y: tuple[int, ...]
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

    @cached_property
    def rows(self) -> Lattice:
        return self.task.lattices[1].stacked(self.lanes)

    @property
    def depth(self) -> Lattice:
        return self.task.lattices[0]

    @property
    def columns(self) -> Lattice:
        return self.task.lattices[2]

    @property
    def steps(self) -> Triple:
        """Input step of each dimension, lanes not counted."""
        depth, rows, columns = (lattice.in_step for lattice in self.task.lattices)
        return depth, rows, columns

    @cached_property
    def row_residues(self) -> Residues:
        return Residues.of(self.rows, self.steps[1])

    @cached_property
    def column_residues(self) -> Residues:
        return Residues.of(self.columns, self.steps[2])

    @cached_property
    def kinds(self) -> tuple[tuple[Kind, ...], ...]:
        """[depth phase and fold group][width phase]"""
        phases = range(len(self.rows.firsts))
        groups = [phases[i : i + self.folds] for i in range(0, len(phases), self.folds)]
        return tuple(
            tuple(self._kind(z, group, x) for x in range(len(self.columns.firsts)))
            for z in range(len(self.depth.firsts))
            for group in groups
        )

    def _kind(self, z: int, group: range, x: int) -> Kind:
        _, height, width = self.task.kernel
        planes: dict[Triple, dict[tuple[int, int], list[int]]] = {}
        for fold, y in enumerate(group):
            lists = self.depth.taps[z], self.rows.taps[y], self.columns.taps[x]
            for tz, ty, tx in product(*lists):
                plane_y, at_y = self.row_residues.place(ty.shift)
                plane_x, at_x = self.column_residues.place(tx.shift)
                plane = planes.setdefault((tz.shift, plane_y, plane_x), {})
                folds = plane.setdefault((at_y, at_x), [-1] * self.folds)
                folds[fold] = (tz.k * height + ty.k) * width + tx.k
        first_y = [self.rows.firsts[y] for y in group]
        return Kind(
            self.depth.firsts[z],
            self.columns.firsts[x],
            tuple(first_y + [-1] * (self.folds - len(first_y))),
            tuple(
                (plane, tuple((at, tuple(folds)) for at, folds in sorted(taps.items())))
                for plane, taps in sorted(planes.items())
            ),
        )

    @property
    def fold_rows(self) -> int:
        return 64 // self.folds

    @property
    def channel_blocks(self) -> int:
        return 1 if self.folds > 1 else -(-self.task.out_channels // 64)


def shapes(task: Task) -> list[Shape]:
    """The ways to lay the task out: folded when few output channels would leave rows empty."""
    result = []
    for folds in (1, 2, 4):
        if folds > 1 and task.out_channels > 64 // folds:
            continue
        phases = task.lattices[1].out_step
        lanes = 1 if phases >= folds or folds % phases else folds // phases
        result.append(Shape(task, lanes, folds))
    return result
