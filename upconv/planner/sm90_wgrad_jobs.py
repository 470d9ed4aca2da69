"""Which taps and channels each block of the Hopper kernel for the weight's gradient accumulates.

A product of the tensor cores has 64 rows: 16 for each of the four warps of a warpgroup, and each
warp reads its rows from where it likes. So

    run      neighbouring taps of one kernel row and width phase: their operands share registers
    share    a run for 16 channels of grad_output: what one warp multiplies
    product  four shares: four blocks of channels, or as many runs as fill it with fewer channels
    job      what one block accumulates: some products for each of its two or three warpgroups
    plane    a part of grad_output that a job reads: up to 64 channels of one phase and depth
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from .problem import Problem

FORMS = (
    (2, 64, 1, 4, 0, 0),
    (3, 64, 1, 3, 0, 0),
    (2, 64, 2, 2, 0, 0),
    (2, 128, 2, 1, 0, 0),
    (2, 64, 4, 1, 0, 0),
    (3, 32, 1, 4, 0, 0),
    (2, 32, 2, 3, 0, 0),
    (3, 32, 2, 1, 0, 0),
    (3, 32, 3, 1, 0, 0),
    (3, 48, 1, 3, 0, 0),
    (2, 64, 1, 4, 1, 0),
    (2, 64, 2, 2, 1, 0),
    (2, 128, 1, 2, 1, 0),
    (2, 128, 2, 1, 1, 0),
    (3, 64, 1, 3, 0, 1),
    (2, 64, 1, 4, 0, 1),
    (3, 64, 1, 3, 0, 2),
    (2, 64, 1, 4, 0, 2),
    (3, 32, 1, 3, 0, 3),
    (3, 64, 1, 3, 0, 3),
)
"""(warpgroups, input channels, runs, taps of a run, pairs, odd) of every compiled kernel, as
UPCONV_WGRAD_FORMS lists them."""
ROWS, WARPS, WARP_ROWS = 64, 4, 16
"""Most channels of a plane, warps of a product, channels of each."""
MAX_OFFSET = 12
"""Runs that start further apart than this many points get planes of their own."""


@dataclass(frozen=True)
class Form:
    consumers: int
    n: int
    groups: int
    run: int
    pairs: bool
    """Planes are copied in words as they lie in memory, and taken apart in registers: both width
    phases of stride 2, or words that hold a 16-bit element among others."""
    element_bytes: int
    stride: int
    """Of the width."""
    odd: int = 0
    """Rows of 16 bits begin anywhere, in mid-word too. 1: stride 1; 2 and 3: stride 2, where planes
    have both width phases, and the taps of a run are `apart` elements from each other."""

    @property
    def in_order(self) -> bool:
        """Pixels lie in order in shared memory: 16-bit types without pairs."""
        return self.element_bytes == 2 and not self.pairs

    @property
    def single(self) -> bool:
        """Pairs with single taps: both phases of a pixel are read as one."""
        return self.pairs and self.run == 1

    @property
    def woven(self) -> bool:
        """Pixels of the input change places, so that taps share registers."""
        return not (self.in_order or self.single)

    @property
    def spread(self) -> int:
        """Points of a plane from one input column to the next. A 16-bit pair is one point."""
        return 2 if self.odd > 1 or (self.pairs and self.element_bytes == 4) else 1

    @property
    def apart(self) -> int:
        """Points from one tap of a run to the next."""
        return 2 if self.odd == 3 else 1

    @property
    def point_bytes(self) -> int:
        return 4 if self.pairs else self.element_bytes

    @property
    def vector(self) -> int:
        """Windows are read from multiples of so many points on."""
        return 2 if self.in_order else 4

    def plane_phase(self, phase: int) -> int:
        """The phase of the plane in which taps of a phase find their points."""
        return phase // 2 * 2 if self.pairs and self.stride % 2 == 0 else phase

    def high(self, run: Run) -> int:
        """Which half of a word is the run's: 0 or 1; 2 or 3 where odd strides take turns."""
        if not self.pairs or self.spread == 2:
            return 0
        if self.stride % 2 == 0:
            return run.phase_x % 2
        return 2 + (run.shift_x * self.stride + run.phase_x) % 2

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.groups * self.run * self.n // 2


@dataclass(frozen=True)
class Run:
    """Neighbouring taps; tap i pairs input column c with point c * spread + shift_x + i * apart."""

    depth: int
    phase_y: int
    shift_y: int
    phase_x: int
    shift_x: int
    tap: int
    count: int


@dataclass(frozen=True)
class Plane:
    channel: int
    depth: int
    phase_y: int
    phase_x: int
    start: int


Share = tuple[int, Run]
"""First of 16 channels, and the run."""
Product = tuple[Share, ...]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Job:
    """What one block accumulates: for each warpgroup its products."""

    consumers: tuple[tuple[Product, ...], ...]
    form: Form
    align: int
    """Planes start at multiples of so many points, so that copies of grad_output are wide."""

    @cached_property
    def shares(self) -> list[Share]:
        return [share for products in self.consumers for product in products for share in product]

    @cached_property
    def taps(self) -> int:
        """Taps that are multiplied. A warpgroup leaves out one that none of its runs has."""
        run = self.form.run
        full = [max(r.count for p in consumer for _, r in p) == run for consumer in self.consumers]
        return self.form.groups * sum(run if f or run == 1 else run - 1 for f in full)

    @cached_property
    def shift_y(self) -> int:
        return min(run.shift_y for _, run in self.shares)

    @cached_property
    def extra_rows(self) -> int:
        return max(run.shift_y for _, run in self.shares) - self.shift_y

    @cached_property
    def planes(self) -> list[Plane]:
        """Each share finds its points in one of them."""
        planes: list[Plane] = []
        for channel, run in sorted(self.shares, key=lambda share: share[1].shift_x):
            if self.place(planes, channel, run) is None:
                start = run.shift_x // self.align * self.align
                planes.append(Plane(*self._rows(channel, run), start))
        return planes

    def _rows(self, channel: int, run: Run) -> tuple[int, int, int, int]:
        phase_x = self.form.plane_phase(run.phase_x)
        return channel // ROWS * ROWS, run.depth, run.phase_y, phase_x

    def place(self, planes: list[Plane], channel: int, run: Run) -> tuple[int, int] | None:
        """Index of the run's plane and offset in it."""
        rows = self._rows(channel, run)
        for index, plane in enumerate(planes):
            same = (plane.channel, plane.depth, plane.phase_y, plane.phase_x) == rows
            if same and 0 <= run.shift_x - plane.start <= MAX_OFFSET:
                return index, run.shift_x - plane.start
        return None

    def windows(self, products: tuple[Product, ...]) -> int:
        """How often a warpgroup reads points for its products.

        Both width phases of pairs find single taps in the same words, which are read once.
        """
        if not self.form.single:
            return len(products)

        def words(channel: int, run: Run) -> tuple[int, ...]:
            plane, offset = self.place(self.planes, channel, run) or (0, 0)
            return channel, run.shift_y, plane, offset // self.form.spread

        return len({tuple(words(*share) for share in p) for p in products})

    def halo(self, planes: list[Plane]) -> int:
        """Points beyond the last column's first that its taps reach."""
        places = [(self.place(planes, *share), share[1]) for share in self.shares]
        apart = self.form.apart
        return max(place[1] + (run.count - 1) * apart for place, run in places if place)


def chains(found: list[tuple[int, int]], most: int, apart: int) -> Iterator[list[tuple[int, int]]]:
    """Sorted (shift, tap) pairs, cut into neighbours, at most `most` of them together."""
    while found:
        length = 1
        while length < min(len(found), most) and found[length][0] == found[0][0] + length * apart:
            length += 1
        yield found[:length]
        found = found[length:]


def runs(problem: Problem, form: Form) -> list[Run]:
    """Every tap of a 3-D problem, in runs."""
    (_, deep, _, pad_z, _, dilation_z), rows, columns = problem.dimensions
    _, height, step_y, pad_y, _, dilation_y = rows
    _, width, step_x, pad_x, _, dilation_x = columns
    by_phase: dict[int, list[tuple[int, int]]] = {}
    for k in range(width):
        shift, phase = divmod(k * dilation_x - pad_x, 1 if form.spread == 2 else step_x)
        by_phase.setdefault(phase, []).append((shift, k))
    result = []
    for phase_x, found in sorted(by_phase.items()):
        for chain in chains(sorted(found), form.run, form.apart):
            for kz in range(deep):
                for ky in range(height):
                    shift_y, phase_y = divmod(ky * dilation_y - pad_y, step_y)
                    tap = (kz * height + ky) * width + chain[0][1]
                    where = (phase_y, shift_y, phase_x, chain[0][0])
                    result.append(Run(kz * dilation_z - pad_z, *where, tap, len(chain)))
    # Runs that share a plane stand together; then those that share its rows.
    return sorted(result, key=lambda r: (r.depth, r.phase_y, r.phase_x, r.shift_x, r.shift_y))


def tap_step(problem: Problem, form: Form) -> int:
    """Distance in the weight between neighbouring taps of a run."""
    stride, dilation = problem.stride[2], problem.dilation[2]
    return stride // dilation if form.spread == 1 and stride % dilation == 0 else 1


def jobs(problem: Problem, form: Form, align: int) -> list[Job]:
    """The jobs of a form, for one block of input channels.

    Every second block of channels is gone through backwards, so that a job that spans two blocks
    still reads few planes.
    """
    every = runs(problem, form)
    shares: list[Share] = []
    for first in range(0, problem.out_channels, ROWS):
        # Of odd rows the channels of a block are spread over all of its rows.
        last = first + ROWS if form.odd and first > 0 else problem.out_channels
        blocks = range(first, min(first + ROWS, last), WARP_ROWS)
        ordered = every if first // ROWS % 2 == 0 else every[::-1]
        shares += [(channel, run) for run in ordered for channel in blocks]
    consumers = _cut(_cut(shares, WARPS), form.groups)
    return [Job(part, form, align) for part in _cut(consumers, form.consumers)]


def _cut(items: Sequence[Item], size: int) -> list[tuple[Item, ...]]:
    return [tuple(items[i : i + size]) for i in range(0, len(items), size)]


def forms(problem: Problem) -> Iterator[Form]:
    """The forms that fit. 16-bit elements are words only where every row starts with a word."""
    size, stride = problem.element_bytes, problem.stride[2]
    anywhere = odd_kind(problem)
    pairs = stride == 2 if size == 4 else stride > 1 and problem.out_size[2] % 2 == 0
    # Where taps are neighbours, runs of them are faster with 16-bit types: by 6 % on pose_head and
    # dcgan3, by 25 % on kb64_1d. But those of pairs leave no time for the bias's gradient.
    dilation = problem.dilation[2]
    neighbours = stride % dilation == 0 and problem.kernel[2] > stride // dilation
    for consumers, n, groups, run, together, odd in FORMS:
        alone = run == 1 and size == 2 and neighbours and not (together and problem.bias)
        if alone or (together and not pairs) or odd not in (0, anywhere):
            continue
        yield Form(consumers, n, groups, run, bool(together), size, stride, odd)


def odd_kind(problem: Problem) -> int:
    """How the forms for rows that begin anywhere see a problem; 0 where they are not needed."""
    stride, dilation = problem.stride[2], problem.dilation[2]
    if problem.element_bytes == 4 or problem.out_size[2] % 2 == 0 or stride > 2:
        return 0
    if stride == 1:
        return 1
    return 3 if dilation == 2 else 2
