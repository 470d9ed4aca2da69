"""What the mma.sync kernel multiplies: lattices in, columns of weights and the steps they need out.

A column is a phase and an output channel; 8 columns make a tile. A step multiplies the pixels at
one shift (two 16-byte channel blocks of them) with the weights of all tiles that have a tap there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from .lattice import Lattice

SPLIT = 3
"""Operand type of float32 that must not be rounded: the sum of two TF32 numbers."""

Shift = tuple[int, int, int]
Step = tuple[tuple[int, int, int, int], int]
"""Shift and channel block of both halves, and the column tiles."""


@dataclass(frozen=True)
class Work:
    """What is to be computed, in terms of lattices. Channels are those of one group."""

    lattices: tuple[Lattice, Lattice, Lattice]
    in_size: tuple[int, int, int]
    kernel: tuple[int, int, int]
    batch: int
    groups: int
    in_channels: int
    out_channels: int
    weight_in: int
    weight_out: int
    weight_group: int
    operand: int
    element_bytes: int
    channels_last: bool = False

    @property
    def slot_channels(self) -> int:
        return 16 // self.element_bytes

    @property
    def warp_tiles(self) -> int:
        """Column tiles of one warp."""
        return 4 if self.operand == SPLIT else 8

    @property
    def tile_bytes(self) -> int:
        """Packed weights of one column tile in one step."""
        return 512 if self.operand == SPLIT else 256

    @property
    def blocks(self) -> int:
        """16-byte channel blocks of a group."""
        return -(-self.in_channels // self.slot_channels)

    @cached_property
    def taps(self) -> tuple[tuple[dict[int, int], ...], ...]:
        """[dimension][phase]: shift -> weight position, for the taps that meet any input."""
        return tuple(
            tuple(
                {
                    tap.shift: tap.k
                    for tap in taps
                    if tap.shift < size and (lattice.count - 1) * lattice.in_step + tap.shift >= 0
                }
                for taps in lattice.taps
            )
            for lattice, size in zip(self.lattices, self.in_size, strict=True)
        )

    @cached_property
    def rows(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The (depth, height) phases with taps, and those without."""
        every = list(product(range(len(self.taps[0])), range(len(self.taps[1]))))
        columns = any(self.taps[2])
        tapped = [(z, y) for z, y in every if columns and self.taps[0][z] and self.taps[1][y]]
        return tapped, [row for row in every if row not in set(tapped)]

    @cached_property
    def columns(self) -> list[int]:
        """The width phases with taps."""
        return [x for x, taps in enumerate(self.taps[2]) if taps]

    @cached_property
    def shifts(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Least and greatest shift of each dimension."""
        result = []
        for phases in self.taps:
            every = [shift for taps in phases for shift in taps] or [0]
            result.append((min(every), max(every)))
        return (result[0], result[1], result[2])


@dataclass(frozen=True)
class Kind:
    """Phases that one block computes: rows, and the columns of the product they make.

    `phases` are (row of the kind, width phase); `taps` maps a shift to the weight position of each
    phase, -1 where it has no tap there.
    """

    rows: tuple[tuple[int, int], ...]
    phases: tuple[tuple[int, int], ...]
    taps: tuple[tuple[Shift, tuple[int, ...]], ...]

    def tiles(self, positions: tuple[int, ...], layout: Layout) -> int:
        """The column tiles that have a weight, as a bit mask."""
        mask = 0
        for phase, position in enumerate(positions):
            if position >= 0:
                first = phase * layout.phase_columns
                for tile in range(first // 8, (first + layout.chunk - 1) // 8 + 1):
                    mask |= 1 << tile
        return mask


@dataclass(frozen=True)
class Layout:
    """How phases and channels become columns."""

    kinds: tuple[Kind, ...]
    chunk: int
    chunks: int
    phase_columns: int
    warps_n: int

    @cached_property
    def masks(self) -> tuple[tuple[int, ...], ...]:
        """[kind][shift]: column tiles with a tap there."""
        return tuple(
            tuple(kind.tiles(positions, self) for _, positions in kind.taps) for kind in self.kinds
        )

    def dense(self, kind: int, warp_tiles: int) -> int:
        """Tiles of every warp, if each step has the first ones of every warp and the kernel has a
        loop for that number; else 0."""
        for count in (warp_tiles, warp_tiles * 3 // 4, warp_tiles // 2):
            mask = sum(((1 << count) - 1) << warp_tiles * n for n in range(self.warps_n))
            if self.masks[kind] and all(tiles == mask for tiles in self.masks[kind]):
                return count if warp_tiles == 8 or count * 4 != warp_tiles * 3 else 0
        return 0

    @cached_property
    def made(self) -> dict[int, list[list[Step]]]:
        """The steps that were asked for already, by slice_blocks: many tilings share them."""
        return {}

    def steps(self, slice_blocks: int) -> list[list[Step]]:
        """[kind]: ((shift, block, shift, block), tiles) of one slice; block -1: nothing.

        Two channel blocks at a shift; an odd number of them goes on with the next shift.
        """
        if slice_blocks in self.made:
            return self.made[slice_blocks]
        result = self.made.setdefault(slice_blocks, [])
        for masks in self.masks:
            halves = [(s, b) for s in range(len(masks)) for b in range(slice_blocks)]
            if len(halves) % 2:
                halves.append((halves[-1][0], -1))
            result.append(
                [
                    ((*one, *two), masks[one[0]] | masks[two[0]])
                    for one, two in zip(halves[::2], halves[1::2], strict=True)
                ]
            )
        return result


def make_kind(work: Work, rows: list[tuple[int, int]], tapped: bool) -> Kind:
    if not tapped:
        return Kind(tuple(rows), (), ())
    phases = [(r, x) for r in range(len(rows)) for x in work.columns]
    taps: dict[Shift, list[int]] = {}
    for index, (r, x) in enumerate(phases):
        z, y = rows[r]
        every = (work.taps[0][z].items(), work.taps[1][y].items(), work.taps[2][x].items())
        for (sz, kz), (sy, ky), (sx, kx) in product(*every):
            position = (kz * work.kernel[1] + ky) * work.kernel[2] + kx
            taps.setdefault((sz, sy, sx), [-1] * len(phases))[index] = position
    return Kind(
        tuple(rows),
        tuple(phases),
        tuple((shift, tuple(positions)) for shift, positions in sorted(taps.items())),
    )


def layouts(work: Work) -> Iterator[Layout]:
    """The ways to make columns: how many warps share them, whole channels or a chunk of them."""
    tapped, bare = work.rows
    width = max(len(work.columns), 1)
    seen = set()
    for warps_n in (1, 2, 4):
        limit = 8 * work.warp_tiles * warps_n
        padded = up(work.out_channels, 8)
        for phase_columns in dict.fromkeys((padded, work.out_channels)):
            if phase_columns * width <= limit:
                chunk, each = work.out_channels, limit // (phase_columns * width)
            elif phase_columns == padded and 8 * width <= limit:
                parts = -(-padded // (limit // width // 8 * 8))
                chunk, each = up(-(-work.out_channels // parts), 8), 1
                phase_columns = chunk
            else:
                continue
            # As many rows as fit, in kinds of equal size.
            count = -(-len(tapped) // each) if tapped else 0
            each = -(-len(tapped) // count) if count else 1
            key = (chunk, phase_columns, each, -(-phase_columns * width * each // limit))
            used = phase_columns * width * each
            if key in seen or (warps_n > 1 and used <= limit // 2):
                continue
            seen.add(key)
            kinds = [
                make_kind(work, tapped[i : i + each], True) for i in range(0, len(tapped), each)
            ]
            kinds += [make_kind(work, bare[i : i + 8], False) for i in range(0, len(bare), 8)]
            chunks = -(-work.out_channels // chunk)
            yield Layout(tuple(kinds), chunk, chunks, phase_columns, warps_n)


def stage_cuts(work: Work, tiles: list[int], stage_bytes: int) -> list[tuple[int, int, int, int]]:
    """(first step, end, weight tiles before, weight tiles) of each stage."""
    most = stage_bytes // work.tile_bytes
    result = []
    begin = before = count = 0
    for step, mask in enumerate(tiles):
        more = mask.bit_count()
        if count + more > most:
            result.append((begin, step, before, count))
            begin, before, count = step, before + count, 0
        count += more
    if tiles:
        result.append((begin, len(tiles), before, count))
    return result


def up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple
