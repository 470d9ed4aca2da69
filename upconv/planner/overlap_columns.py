"""The kernel for few output channels: places, phases and shifts, and the columns of its product.

Columns of the product are *sums* (an output channel with a phase of depth and height) times the
taps of the width; those of neighbouring pixels are then added up to outputs. Place b and phase r of
the width are output b * stride + r, in depth and height output b * stride + r - padding: there no
two phases share a store, and as many as can be meet the same inputs. A tap k of a phase meets input
b + shift.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from .problem import Problem, three


@dataclass(frozen=True)
class Axis:
    """One dimension: of each phase its taps as (tap, shift), and the places that have outputs."""

    phases: tuple[tuple[tuple[int, int], ...], ...]
    first: int
    count: int

    @property
    def shifts(self) -> list[int]:
        return [shift for taps in self.phases for _, shift in taps]

    @property
    def low(self) -> int:
        return min(self.shifts)

    @property
    def margin(self) -> int:
        return max(self.shifts) - self.low


def axis(kernel: int, stride: int, start: int, padding: int, out: int, dilation: int) -> Axis:
    """Place 0 and phase 0 are output `-start`."""
    ahead = padding - start
    phases = tuple(
        tuple(
            (tap, (phase + ahead - tap * dilation) // stride)
            for tap in range(kernel)
            if (phase + ahead - tap * dilation) % stride == 0
        )
        for phase in range(stride)
    )
    first = start // stride
    return Axis(phases, first, (out - 1 + start) // stride - first + 1)


@dataclass(frozen=True)
class Sum:
    """An output channel with a phase of depth and height; its first column, -1: it has no taps."""

    channel: int
    z: int
    y: int
    column: int


@dataclass(frozen=True)
class Shift:
    """Input rows that places meet, and the tiles of 8 columns with a tap there, as bits."""

    z: int
    y: int
    tiles: int


@dataclass(frozen=True)
class Columns:
    """How the columns of the product are used. Shifts that concern all tiles come first."""

    sums: tuple[Sum, ...]
    shifts: tuple[Shift, ...]
    tiles: int

    @property
    def shifts_all(self) -> int:
        return sum(shift.tiles == (1 << self.tiles) - 1 for shift in self.shifts)


def axes_of(problem: Problem) -> tuple[Axis, Axis, Axis]:
    """Depth, height and width."""
    padding = three(problem.padding, 0)
    starts = (*padding[:2], 0)
    lists = [three(problem.kernel, 1), three(problem.stride, 1), starts, padding]
    lists += [three(problem.out_size, 1), three(problem.dilation, 1)]
    z, y, x = (axis(*each) for each in zip(*lists, strict=True))
    return z, y, x


def columns_of(problem: Problem) -> Columns:
    """Sums that meet the same shifts share tiles, so that no weight of zero meets a number."""
    z, y, _ = axes_of(problem)
    classes: dict[tuple[tuple[int, int], ...], list[tuple[int, int, int]]] = {}
    for pz, py in product(range(len(z.phases)), range(len(y.phases))):
        met = product((s for _, s in z.phases[pz]), (s for _, s in y.phases[py]))
        members = classes.setdefault(tuple(sorted(met)), [])
        members += [(c, pz, py) for c in range(problem.out_channels // problem.groups)]
    sums: list[Sum] = []
    masks: dict[tuple[int, int], int] = {}
    column, taps = 0, problem.kernel[-1]
    for shifts, members in sorted(classes.items(), key=lambda item: -len(item[0])):
        first = column
        for index, member in enumerate(members):
            sums.append(Sum(*member, first + index * taps if shifts else -1))
        if shifts:
            column += -(-len(members) * taps // 8) * 8
        for shift in shifts:
            masks[shift] = masks.get(shift, 0) | (1 << column // 8) - (1 << first // 8)
    every = (1 << column // 8) - 1
    order = sorted(masks, key=lambda shift: (masks[shift] != every, shift))
    return Columns(tuple(sums), tuple(Shift(*s, masks[s]) for s in order), column // 8)
