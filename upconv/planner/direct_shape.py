"""What the CUDA-core kernel computes: a convolution on three axes, and the rows of its threads.

The kernel does not know in which direction it works. A `Convolution` is the forward pass or the
gradient of the input alike: three lattices, channels of a group, and the weight's strides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from .lattice import Lattice
from .problem import Problem

NOWHERE = 1 << 28
"""First output of a fold that does not exist: past the end of every tensor that is served."""

Shift = tuple[int, int, int]


@dataclass(frozen=True)
class Axis:
    """One dimension: outputs `q * out_step + first + phase` read inputs `q * in_step + shift`."""

    in_size: int
    out_size: int
    in_step: int
    out_step: int
    first: int
    taps: tuple[tuple[tuple[int, int], ...], ...]
    """For each phase its (shift, weight position) pairs."""

    @staticmethod
    def of(lattice: Lattice, in_size: int) -> Axis:
        """The lattice, turned so that its phases share as many shifts as possible.

        Phases are counted from the output of point 0, and which output that is is free: with
        stride 3, kernel 9 and padding 4 the phases 0, 1, 2 read shifts -1..1, -1..1 and 0..2, but
        the phases -1, 0, 1 all read -1..1.
        """
        return Axis._turned(lattice, in_size, Axis._best_turn(lattice, in_size))

    @staticmethod
    def _best_turn(lattice: Lattice, in_size: int) -> int:
        """Goes from turn to turn by moving one phase: 2048 phases, made anew for each, took 4 s."""
        count, step = len(lattice.firsts), lattice.in_step
        if count != lattice.out_step:
            return 0
        shifts = Counter(tap.shift for taps in lattice.taps for tap in taps)
        costs: list[tuple[int, int, int]] = []
        for turn in (0, *range(count - 1, 0, -1)):
            if turn:
                for tap in lattice.taps[turn]:
                    shifts[tap.shift] -= 1
                    shifts[tap.shift - step] += 1
            last = Axis._last(lattice, turn)
            met = [s for s, taps in shifts.items() if taps and s < in_size and s + last >= 0]
            steps = [shift // step for shift in met]
            margin = max(steps, default=0) - min(steps, default=0)
            costs.append((len(met), margin, turn))
        return min(costs)[-1]

    @staticmethod
    def _last(lattice: Lattice, turn: int) -> int:
        """Where the last point reads at shift 0."""
        first = turn - len(lattice.firsts) if turn else 0
        return (-(-(lattice.size - first) // lattice.out_step) - 1) * lattice.in_step

    @staticmethod
    def _turned(lattice: Lattice, in_size: int, turn: int) -> Axis:
        phases, last = len(lattice.firsts), Axis._last(lattice, turn)
        first = turn - phases if turn else 0
        taps = []
        for place in range(first, first + phases):
            back = lattice.in_step if place < 0 else 0
            shifted = [(tap.shift - back, tap.k) for tap in lattice.taps[place % phases]]
            taps.append(tuple((s, k) for s, k in shifted if s < in_size and s + last >= 0))
        step = lattice.out_step
        return Axis(in_size, lattice.size, lattice.in_step, step, first, tuple(taps))

    @property
    def phases(self) -> int:
        return len(self.taps)

    @cached_property
    def points(self) -> int:
        return -(-(self.out_size - self.first) // self.out_step)

    @cached_property
    def shifts(self) -> frozenset[int]:
        return frozenset(shift for taps in self.taps for shift, _ in taps)

    @cached_property
    def low(self) -> int:
        """Position of the tile's first input, in input steps from the first point."""
        return min((shift // self.in_step for shift in self.shifts), default=0)

    @cached_property
    def margin(self) -> int:
        """Positions that a tile has more than points."""
        return max((shift // self.in_step for shift in self.shifts), default=0) - self.low


@dataclass(frozen=True)
class Convolution:
    """Channels are those of one group; strides of the weight are in elements."""

    dtype: str
    batch: int
    groups: int
    in_channels: int
    out_channels: int
    axes: tuple[Axis, Axis, Axis]
    kernel: tuple[int, int, int]
    weight_in: int
    weight_out: int
    set_aside: int = 0
    """Channels after which sums are set aside and begun afresh; 0: never."""

    @staticmethod
    def of(problem: Problem, in_steps: tuple[int, ...] = (1, 1, 1)) -> Convolution:
        """The forward pass. With input steps (of the last dimensions) over 1, neighbouring outputs
        become phases of one point, so that a thread finds rows to share its inputs among."""
        steps = in_steps[-problem.ndim :]
        lattices = [Lattice.of(problem, i).stacked(step) for i, step in enumerate(steps)]
        axes = [Axis.of(lattice, n) for lattice, n in zip(lattices, problem.in_size, strict=True)]
        taps, outputs = prod(problem.kernel), problem.out_channels // problem.groups
        channels = (problem.in_channels // problem.groups, outputs)
        return Convolution._made(problem, axes, channels, (outputs * taps, taps))

    @staticmethod
    def of_input_gradient(problem: Problem) -> Convolution:
        """The gradient of the input: reads grad_output, writes grad_input."""
        lattices = [Lattice.of_input_gradient(problem, i) for i in range(problem.ndim)]
        axes = [Axis.of(lattice, n) for lattice, n in zip(lattices, problem.out_size, strict=True)]
        taps, outputs = prod(problem.kernel), problem.out_channels // problem.groups
        channels = (outputs, problem.in_channels // problem.groups)
        return Convolution._made(problem, axes, channels, (taps, outputs * taps))

    @staticmethod
    def _made(
        problem: Problem, axes: list[Axis], channels: tuple[int, int], strides: tuple[int, int]
    ) -> Convolution:
        missing = 3 - problem.ndim
        z, y, x = [Axis(1, 1, 1, 1, 0, (((0, 0),),))] * missing + axes
        depth, height, width = (1,) * missing + problem.kernel
        return Convolution(
            problem.dtype,
            problem.batch,
            problem.groups,
            *channels,
            (z, y, x),
            (depth, height, width),
            *strides,
            channels_until_aside(problem, channels[0], prod(max(map(len, a.taps)) for a in axes)),
        )

    @property
    def weight_group(self) -> int:
        return self.in_channels * self.out_channels * prod(self.kernel)


LONG_SUM, PART_OF_SUM = 32, 36
"""Products from which a sum of float32 is added up in two steps, and those of one part: 504 in one
step had an error of 1.2e-6 of the largest output, in parts of 18 2.5e-7; PyTorch has 1.9e-7. 48 in
one step (kb75) had 4.7e-7, where PyTorch has 1.3e-7."""


def channels_until_aside(problem: Problem, channels: int, taps: int) -> int:
    """Channels whose products make one part of a sum, a power of two; 0: all of them."""
    if problem.dtype != "float32" or problem.tf32 or channels * taps < LONG_SUM:
        return 0
    count = 1
    while 2 * count * taps <= PART_OF_SUM:
        count *= 2
    return count if count < channels else 0


@dataclass(frozen=True)
class Kind:
    """Phases that a thread accumulates at one point: `folds` row phases of `width` columns."""

    first_x: int
    columns: int
    firsts: tuple[tuple[int, int], ...]
    shifts: tuple[Shift, ...]
    taps: tuple[int, ...]
    """[shift][fold][column]: weight position, -1 where the phase has no tap at that shift."""


@dataclass(frozen=True)
class Rows:
    """What the threads hold at one point: channels x folds x width outputs of one kind."""

    convolution: Convolution
    rows: int
    width: int
    folds: int

    @property
    def channels(self) -> int:
        return self.rows // (self.folds * self.width)

    @property
    def channel_blocks(self) -> int:
        return -(-self.convolution.out_channels // self.channels)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Those with most shifts first, so that the warps of a block have about the same to do."""
        z, y, x = self.convolution.axes
        pairs = sorted(
            product(range(z.phases), range(y.phases)),
            key=lambda pair: ([s for s, _ in z.taps[pair[0]]], [s for s, _ in y.taps[pair[1]]]),
        )
        kinds = [
            self._kind(pairs[i : i + self.folds], start)
            for i in range(0, len(pairs), self.folds)
            for start in range(0, x.phases, self.width)
        ]
        return tuple(sorted(kinds, key=lambda kind: -len(kind.shifts)))

    def _kind(self, pairs: list[tuple[int, int]], start: int) -> Kind:
        z, y, x = self.convolution.axes
        _, height, width = self.convolution.kernel
        columns = min(self.width, x.phases - start)
        found: dict[Shift, list[int]] = {}
        for fold, (phase_z, phase_y) in enumerate(pairs):
            for (sz, kz), (sy, ky) in product(z.taps[phase_z], y.taps[phase_y]):
                for column in range(columns):
                    for sx, kx in x.taps[start + column]:
                        taps = found.setdefault((sz, sy, sx), [-1] * (self.folds * self.width))
                        taps[fold * self.width + column] = (kz * height + ky) * width + kx
        firsts = [(z.first + phase_z, y.first + phase_y) for phase_z, phase_y in pairs]
        firsts += [(NOWHERE, NOWHERE)] * (self.folds - len(pairs))
        shifts = sorted(found)
        taps_in_order = tuple(tap for shift in shifts for tap in found[shift])
        return Kind(x.first + start, columns, tuple(firsts), tuple(shifts), taps_in_order)


def convolutions(problem: Problem) -> list[Convolution]:
    """The forward pass, and where its points have hardly an output each, points of 2 or 4."""
    plain = Convolution.of(problem)
    if plain.out_channels * prod(axis.phases for axis in plain.axes) > 2:
        return [plain]
    steps = [(1, 1, 2), (1, 1, 4), (1, 2, 2)] if problem.ndim > 1 else [(1, 1, 2), (1, 1, 4)]
    wide = [(y, x) for _, y, x in steps if problem.out_size[-1] >= 8 * x]
    return [plain, *(Convolution.of(problem, (1, y, x)) for y, x in wide)]


def row_choices(convolution: Convolution, sizes: list[int]) -> list[Rows]:
    """The ways to give `sizes` outputs to a thread: all width phases together where they fit."""
    z, y, x = convolution.axes
    result = []
    for rows in sizes:
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        width = next((n for n in divisors if n >= x.phases), rows)
        for folds in divisors:
            spare = rows // (width * folds) if rows % (width * folds) == 0 else 0
            if spare and folds <= z.phases * y.phases and spare < 2 * convolution.out_channels:
                result.append(Rows(convolution, rows, width, folds))
    return result
