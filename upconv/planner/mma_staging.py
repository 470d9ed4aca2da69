"""How the outputs of a block of the mma.sync kernel lie in shared memory before they leave it.

by phases   [row phase][channel][row of the tile][column]: what lanes lay down spreads over banks,
            and rows go out by vectors of one size (csrc/cuda/mma_store.cuh)
as a sheet  [channel][plane][row][column] of the output itself, with all phases, for bulk copies:
            pitches are those of the tensor modulo 16 bytes (csrc/cuda/mma_sheet.cuh)
"""

from __future__ import annotations

from dataclasses import dataclass

from .mma_columns import Layout, Work, up

BANKS, BANK_BYTES = 32, 4


@dataclass(frozen=True)
class Staging:
    """Pitches and sizes in elements."""

    segment: int
    """From one output row to the next."""
    plane_pitch: int
    """Of a sheet: from one output plane to the next."""
    channel_pitch: int
    elements: int
    row_pitch: int = 0
    """By phases: from the rows of one row phase to those of the next."""

    def base(self, index: int, first_z: int, first_y: int) -> int:
        """Where a row phase begins, the `index`-th of its kind."""
        by_place = first_z * self.plane_pitch + first_y * self.segment
        return index * self.row_pitch if self.row_pitch else by_place


def by_phases(
    work: Work, layout: Layout, rows: int, width: int, spare: bool, whole: int
) -> Staging:
    """`rows` of `width` points, stored by vectors of `whole` elements. `spare`: points of the warps
    that the box does not have lie down behind its last row.

    A channel has 16 bytes past a multiple of 64, so that a warp's rows spread over banks.
    """
    size, step = work.element_bytes, work.lattices[2].out_step
    segment = up(width * step, whole)
    elements = rows * segment + spare * step
    channel_pitch = (up(elements * size - 16, 64) + 16) // size
    row_pitch = layout.chunk * channel_pitch
    staged = max(len(kind.rows) if kind.phases else 0 for kind in layout.kinds)
    # Rows without taps take 16 bytes of bias for each channel.
    elements = max(staged * row_pitch, layout.chunk * 16 // size)
    return Staging(segment, 0, channel_pitch, elements, row_pitch)


def as_sheet(work: Work, layout: Layout, size: tuple[int, int, int]) -> Staging:
    """Of a box of planes, rows and columns."""
    depth, height, width = (lattice.size for lattice in work.lattices)
    planes, rows, columns = (
        points * lattice.out_step for points, lattice in zip(size, work.lattices, strict=True)
    )
    whole = 16 // work.element_bytes
    segment = next_congruent(columns, width, whole)
    plane_pitch = next_congruent(rows * segment, height * width, whole)
    least = next_congruent(planes * plane_pitch, depth * height * width, whole)
    channel_pitch = min(
        range(least, least + 8 * whole, whole), key=lambda pitch: wavefronts(work, pitch)
    )
    return Staging(segment, plane_pitch, channel_pitch, layout.chunk * channel_pitch + whole)


def next_congruent(least: int, to: int, modulus: int) -> int:
    """The smallest number from `least` on that is `to` modulo `modulus`."""
    return least + (to - least) % modulus


def wavefronts(work: Work, channel_pitch: int) -> int:
    """How often a warp's store goes to the same bank: 8 points of a row, 4 channels two apart."""
    size, step = work.element_bytes, work.lattices[2].out_step
    words: dict[int, set[int]] = {}
    for point in range(8):
        for channel in range(0, 8, 2):
            word = (point * step + channel * channel_pitch) * size // BANK_BYTES
            words.setdefault(word % BANKS, set()).add(word)
    return max(map(len, words.values()))
