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
from .operands import SPLIT

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


@dataclass(frozen=True)
class Layout:
    """How phases and channels become columns.

    `spread`: every warp has all phases, for `phase_columns` channels of its own, so that no warp
    waits while others multiply for a phase; else the phases follow each other over all warps.
    """

    kinds: tuple[Kind, ...]
    chunk: int
    chunks: int
    phase_columns: int
    warps_n: int
    warp_columns: int
    spread: bool

    @cached_property
    def masks(self) -> tuple[tuple[int, ...], ...]:
        """[kind][shift]: column tiles with a tap there."""
        return tuple(
            tuple(self.tiles(positions) for _, positions in kind.taps) for kind in self.kinds
        )

    def tiles(self, positions: tuple[int, ...]) -> int:
        """The column tiles that have a weight, as a bit mask."""
        mask = 0
        for phase, position in enumerate(positions):
            for warp in range(self.warps_n if self.spread else 1):
                count = min(self.phase_columns, self.chunk - warp * self.phase_columns)
                if position < 0 or count <= 0:
                    continue
                first = warp * self.warp_columns + phase * self.phase_columns
                for tile in range(first // 8, (first + count - 1) // 8 + 1):
                    mask |= 1 << tile
        return mask

    @cached_property
    def made(self) -> dict[int, list[list[Step]]]:
        """The steps that were asked for already, by slice_blocks: many tilings share them."""
        return {}

    def steps(self, slice_blocks: int) -> list[list[Step]]:
        """[kind]: ((shift, block, shift, block), tiles) of one slice; block -1: nothing.

        Two channel blocks at a shift; an odd number of them goes on with the next shift. Shifts
        with the same tiles follow each other.
        """
        if slice_blocks in self.made:
            return self.made[slice_blocks]
        result = self.made.setdefault(slice_blocks, [])
        for masks in self.masks:
            order = sorted(range(len(masks)), key=lambda shift: masks[shift])
            halves = [(s, b) for s in order for b in range(slice_blocks)]
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
    width = max(len(work.columns), 1)
    room = 8 * work.warp_tiles
    for warps_n in (1, 2, 4):
        padded = up(-(-work.out_channels // warps_n), 8)
        options = (padded, work.out_channels) if warps_n == 1 else (padded,)
        for phase_columns in dict.fromkeys(options):
            if phase_columns * width <= room:
                chunk, each = work.out_channels, room // (phase_columns * width)
            elif phase_columns == padded and 8 * width <= room:
                most = room // width // 8 * 8 * warps_n
                parts = -(-work.out_channels // most)
                phase_columns = up(-(-work.out_channels // (parts * warps_n)), 8)
                chunk, each = min(phase_columns * warps_n, up(work.out_channels, 8)), 1
            else:
                continue
            if chunk > phase_columns * (warps_n - 1):
                yield make_layout(work, chunk, each, phase_columns, warps_n, True)
        if room < 8 * width <= room * warps_n:  # too many phases for one warp
            parts = -(-up(work.out_channels, 8) // (room * warps_n // width // 8 * 8))
            chunk = up(-(-work.out_channels // parts), 8)
            yield make_layout(work, chunk, 1, chunk, warps_n, False)


def make_layout(
    work: Work, chunk: int, each: int, phase_columns: int, warps_n: int, spread: bool
) -> Layout:
    """Kinds of at most `each` rows, as equal in size as may be; rows without taps by themselves."""
    tapped, bare = work.rows
    count = -(-len(tapped) // each)
    each = -(-len(tapped) // count) if count else 1
    kinds = [make_kind(work, tapped[i : i + each], True) for i in range(0, len(tapped), each)]
    kinds += [make_kind(work, bare[i : i + 8], False) for i in range(0, len(bare), 8)]
    chunks = -(-work.out_channels // chunk)
    return Layout(tuple(kinds), chunk, chunks, phase_columns, warps_n, 8 * work.warp_tiles, spread)


def uniform(work: Work, tiles: list[int], stage_bytes: int) -> bool:
    """Are stages cut where the tiles change? Only if they do not become too short by that."""
    return len(tiles) >= 3 * len(stage_cuts(work, tiles, stage_bytes, True)) or len(set(tiles)) == 1


def stages_of(work: Work, tiles: list[int], stage_bytes: int) -> list[tuple[int, int, int, int]]:
    return stage_cuts(work, tiles, stage_bytes, uniform(work, tiles, stage_bytes))


def stage_cuts(
    work: Work, tiles: list[int], stage_bytes: int, same: bool
) -> list[tuple[int, int, int, int]]:
    """(first step, end, weight tiles before, weight tiles) of each stage.

    `same`: all steps of a stage have the same tiles.
    """
    most = stage_bytes // work.tile_bytes
    result = []
    begin = before = count = 0
    for step, mask in enumerate(tiles):
        more = mask.bit_count()
        if count + more > most or (same and count and mask != tiles[begin]):
            result.append((begin, step, before, count))
            begin, before, count = step, before + count, 0
        count += more
    if tiles:
        result.append((begin, len(tiles), before, count))
    return result


def up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple
