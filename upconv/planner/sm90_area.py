"""Areas of the Hopper kernel's tiles: which pixels a tile has, how they lie, how they are copied.

A tile is `images x height x width` lattice points of one depth. Its input lies in shared memory
row after row, `pitch` pixels from one row to the next, so that the N pixels of one WGMMA run over
row ends; the columns between rows are computed for nothing. Where a tile spans the whole width
(height), the margin of one row (image) is the margin of the next as well: both are zeros.

Or a row lies in strips: 8 columns, which a WGMMA reads together, and margins of their own, `strip`
pixels from one to the next. No column is computed for nothing but past the image, and the tile has
more pixels.

TMA takes the whole tile as one box where rows begin on 16 bytes. Elsewhere every 2nd, 4th or 8th
row does, and the rows of each residue are a box of their own; or the whole image is one long row
("flat"), where no tap reaches another pixel. Channels that do not begin on 16 bytes are divided in
the same way, into classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from .sm90_task import Shape, Task

GATHER_BYTES = 2 * 8 * 96 * 4 + 6 * 64 * 96
"""Table of offsets and raw ring of the loaders, where they copy without TMA."""
BOX_RINGS = ((8 * 1024, 32 * 1024), (16 * 1024, 48 * 1024))
"""Bytes of boxes up to which they take several channel blocks, since each costs barriers and one of
the feeder's copies, and of all in the raw ring, which must be under way to keep the memory busy.
The second where a tile has several boxes: fewer and larger ones."""
BOX_BEST, BOX_SLICES, MUCH_READ = 16 * 1024, 4, 15.0
"""Where at least so many slices follow each other, boxes are as large as this, and two of them are
enough: 2 % faster than 8 KB in 90 pairs of tilings, unet_up1 and hifigan1_1d 3 to 4 %. Not where
what they bring is read more often than the last says (kb69: 1 % slower), and with fewer slices more
boxes are to be on their way: kb57 2.04 -> 2.31 ms."""
LARGE_RINGS = ((32 * 1024, 96 * 1024), (32 * 1024, 64 * 1024))
RARELY_READ, OFTEN_READ = (4.0, 6.0), (6.0, 9.0)
"""Where the tensor cores read what a box brings fewer times than that (for tiles of one box, and of
several), filling the tile limits, and boxes are to be as large as may be: they are 4 to 30 % faster
than boxes of 8 KB in 180 pairs of tilings, nnunet_3d's input gradient 0.37 -> 0.27 ms, unet_up4's
0.64 -> 0.51, kb77_3d's in BF16 0.22 -> 0.15. Where it is read more often than the second says, the
small ones are 2 % faster."""
BOX_MOST = 256
"""Elements of a box along one dimension."""
BOX_STEP_MOST = 8
"""Greatest step of a box along its rows."""
MAX_CHUNKS = 16
COPY_BOXES, COPY_ROWS = 3, 4
"""`copy` for TMA boxes: of whole tiles, and of every few rows and channels."""
ROW_TILES = ((256, 1), (216, 1), (128, 2), (104, 2))
"""(N, row blocks of a job) of the kernels for COPY_ROWS; UPCONV_SM90_..._ROW_TILES."""
SPLIT_ROW_TILES = ((256, 1), (208, 1))
"""The same for split float32."""
FLAT_SHIFT = 30
"""`raw_shift` where all rows of an image are one group."""
ITEM_PIXELS = 4
"""Pixels that a loader copies together."""
GROUP = 8
"""Columns that a WGMMA reads from neighbouring pixels."""
SLACK_PIXELS = 256
"""After the last channel block, that columns which are not stored may reach into."""
FEWER_COLUMNS = 1.03
"""Strips are looked at where they save so much of the products."""


@dataclass(frozen=True)
class Area:
    images: int
    height: int
    width: int
    pitch: int
    rows: int
    pixels: int
    vector: int
    copy: int
    start: int
    """Planes begin at multiples of so many columns."""
    flat: bool = False
    lanes: int = 1
    """Of the tile: where it is one lattice point high, every input row is one."""
    strip: int = GROUP
    """Pixels from 8 columns to the next 8."""

    @property
    def in_strips(self) -> bool:
        return self.strip > GROUP

    @property
    def row_columns(self) -> int:
        """Accumulator columns from one row to the next."""
        return self.pitch // self.strip * GROUP if self.in_strips else self.pitch

    @property
    def used_columns(self) -> int:
        """Accumulator columns up to the last that is stored."""
        rows = (self.images - 1) * self.rows + self.height
        return (rows - 1) * self.row_columns + self.width

    @property
    def reach(self) -> int:
        """Input columns of a row of the tile, margins included."""
        return self.row_columns - GROUP + self.strip if self.in_strips else self.pitch

    @property
    def points(self) -> int:
        """Of the lattice."""
        return self.images * self.height * self.width

    @property
    def one_row(self) -> bool:
        """Of lattice points."""
        return self.images * self.height == 1


class Box(NamedTuple):
    """The TMA boxes of some channel blocks of a tile, as the kernel's parameters name it all."""

    raw_w: int
    raw_h: int
    """Columns and rows that all of them together have."""
    raw_blocks: int
    raw_bytes: int
    """Channel blocks, and bytes with what fills boxes up to 128."""
    raw_chunks: int
    """How often that fits into the raw ring."""
    raw_rows: int = 0
    """Of one box."""
    raw_residues: int = 1
    raw_classes: int = 1
    """A box has every so many-th row and channel."""
    raw_shift: int = 0
    raw_step: int = 1
    """It takes every so many-th group of `1 << raw_shift` rows, which begins on 16 bytes."""
    raw_stride: int = 0
    """Bytes from one box to the next."""

    @property
    def boxes(self) -> int:
        """TMA boxes of some channel blocks of a tile."""
        return min(self.raw_residues, self.raw_h) * self.raw_classes


def up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def aligned(offset: int, start: int) -> int:
    """First column of a plane whose taps begin at `offset`."""
    return offset // start * start


def box_of(shape: Shape, area: Area) -> tuple[int, int]:
    """Columns and rows of the TMA boxes that hold one channel of a tile.

    A box begins on 16 bytes, at most `late` columns before the tile does. TMA takes rows with a
    step, but columns as they lie.
    """
    task = shape.task
    whole = 16 // task.element_bytes
    _, in_h, in_w = task.in_size
    if area.flat:
        parts = area.height < shape.rows.count
        even = gcd(whole, in_h * in_w, area.height * in_w if parts else 0)
        return up(up(area.rows * area.pitch, ITEM_PIXELS) + whole - even, whole), 1
    step = shape.steps[2]
    firsts = [aligned(low, area.start) for low in shape.column_residues.low.values()]
    late = max((i * area.width * step + first) % whole for i in range(whole) for first in firsts)
    if area.copy == COPY_ROWS:
        late = whole - gcd(whole, in_w, area.width * step, *firsts)
    return up((area.reach - 1) * step + 1 + late, whole), area.rows * area.lanes


def row_groups(shape: Shape, area: Area) -> tuple[int, int, int]:
    """Rows that begin on 16 bytes together, boxes that take the rows of a tile in turn, and the
    step of each in such groups."""
    step = shape.steps[1]
    if area.flat:
        return 1 << FLAT_SHIFT, 1, 1
    if area.copy == COPY_BOXES:
        return 1, 1, step
    group = 16 // gcd(16, shape.task.in_size[2] * shape.task.element_bytes)
    return group, group // gcd(group, step), step // gcd(group, step)


def boxes_fit(shape: Shape, area: Area) -> bool:
    columns, rows = box_of(shape, area)
    _, residues, step = row_groups(shape, area)
    spanned = -(-rows // residues) * step
    return max(columns, rows, spanned, area.images) <= BOX_MOST and step <= BOX_STEP_MOST


def channel_classes(task: Task) -> int:
    """Every so many-th channel begins on 16 bytes."""
    return 16 // gcd(16, prod(task.in_size) * task.element_bytes)


def compiled(area: Area, n: int, blocks: int, split: bool) -> bool:
    """Is there a kernel for this way of copying and this tile?"""
    return area.copy != COPY_ROWS or (n, blocks) in (SPLIT_ROW_TILES if split else ROW_TILES)


def rows_boxed(task: Task) -> bool:
    """Can TMA take rows that do not begin on 16 bytes?"""
    classes = channel_classes(task)
    addressed = classes * prod(task.in_size) < 2**30
    return not task.channels_last and task.in_channels % classes == 0 and addressed


def copy_modes(shape: Shape) -> list[tuple[int, int]]:
    """The ways to copy input rows (the kernel's `copy`, alignment in pixels), best first."""
    task = shape.task
    width, element = task.in_size[2], task.element_bytes
    if task.channels_last:
        return [copy_mode(shape)]
    # Two pixels of 16 bits are read together, but for a step and for rows of odd length.
    together = shape.steps[2] == 1 and width % 2 == 0
    start = 4 // element if together else 1
    if width * element % 16 == 0 and shape.steps[1] <= BOX_STEP_MOST:
        return [(COPY_BOXES, start), copy_mode(shape)]
    if rows_boxed(task):
        return [(COPY_ROWS, start), copy_mode(shape)]
    return [copy_mode(shape)]


def copy_mode(shape: Shape) -> tuple[int, int]:
    """The same without TMA."""
    width, single = shape.task.in_size[2], shape.task.element_bytes == 4
    if shape.task.channels_last:
        return 0, 1
    if shape.steps[2] > 1:
        return (1, 1) if single else (2, 1)
    if width % ITEM_PIXELS == 0:
        return 0, ITEM_PIXELS
    if single:
        return 1, 1
    return (1, 2) if width % 2 == 0 else (2, 1)


def widths(shape: Shape, n: int, vector: int, start: int) -> list[int]:
    """Widths of a tile, in lattice points: what cuts the image evenly and fits rows into N."""
    count = shape.columns.count
    whole = vector // gcd(vector, shape.columns.out_step)
    parts = {-(-count * rows // n) for rows in range(1, 17)} | {1}
    cut = {up(-(-count // part), max(whole, start) if part > 1 else whole) for part in parts}
    return sorted(width for width in cut if width <= n)


def areas(shape: Shape, n: int, vector: int) -> Iterator[Area]:
    """The tile areas that fit N pixels, stored by so many elements at a time, or by fewer where
    closer rows then let more points in: three images of dcgan1 instead of two."""
    most = 0
    for each in sorted({vector, *(v for v in (1, 2) if v < vector)}, reverse=True):
        found = list(areas_stored(shape, n, each))
        yield from (area for area in found if area.points > most)
        most = max((area.points for area in found), default=most)


def areas_stored(shape: Shape, n: int, vector: int) -> Iterator[Area]:
    """The tile areas that fit N pixels, each with the best way to copy it."""
    fitting = [area for area in areas_flat(shape, n, vector) if boxes_fit(shape, area)]
    for copy, start in copy_modes(shape):
        if fitting:
            break
        found = areas_copied(shape, n, vector, copy, start)
        fitting = [area for area in found if copy < COPY_BOXES or boxes_fit(shape, area)]
    yield from worthwhile(shape, n, fitting)


def worthwhile(shape: Shape, n: int, found: list[Area]) -> Iterator[Area]:
    """All but the strips that save little of the products, or reach past the tile."""
    plain = [
        (stored_share(shape, n, area), area.pixels / area.points)
        for area in found
        if not area.in_strips
    ]
    for area in found:
        if not area.in_strips:
            yield area
            continue
        share, pixels = stored_share(shape, n, area), area.pixels / area.points
        unused = (n - area.used_columns) // GROUP * area.strip
        as_good = any(s * FEWER_COLUMNS >= share and p <= pixels for s, p in plain)
        if unused <= SLACK_PIXELS and not as_good:
            yield area


def tile_counts(shape: Shape, area: Area) -> tuple[int, int, int, int]:
    """Images, depths, rows and columns of tiles."""
    return (
        -(-shape.task.batch // area.images),
        shape.depth.count,
        -(-shape.rows.count // area.height),
        -(-shape.columns.count // area.width),
    )


def stored_share(shape: Shape, n: int, area: Area) -> float:
    """Of the accumulator columns."""
    use = shape.task.batch * shape.depth.count * shape.rows.count * shape.columns.count
    return use / (prod(tile_counts(shape, area)) * n)


def margins(shape: Shape) -> bool:
    """Does any tap reach another pixel of its row or column?"""
    lows = *shape.row_residues.low.values(), *shape.column_residues.low.values()
    return any(lows) or shape.row_residues.most + shape.column_residues.most > 0


def most_images(task: Task, n: int, used: int, image_pixels: int) -> int:
    """Images of a tile; those of a group are too far apart for one TMA box."""
    return min(1 + (n - used) // image_pixels, task.batch) if task.groups == 1 else 1


def areas_flat(shape: Shape, n: int, vector: int) -> Iterator[Area]:
    """Whole rows where these do not start on 16 bytes, and no tap has a shift."""
    task = shape.task
    (_, in_h, pitch), element = task.in_size, task.element_bytes
    stepped = shape.lanes * shape.steps[1] * shape.steps[2] > 1
    if pitch * element % 16 == 0 or not rows_boxed(task) or stepped or margins(shape):
        return
    count_y, width, span = shape.rows.count, shape.columns.count, shape.columns.out_step
    if width > min(pitch, n):  # a column past the input would read the next row,
        return
    if count_y > in_h and task.in_size[0] * channel_classes(task) > 1:  # a row the next depth
        return
    vector = next(v for v in (vector, 2, 1) if width * span % v == pitch * span % v == 0)
    most = min(1 + (n - width) // pitch, count_y)
    for height in {most, -(-count_y // -(-count_y // most))}:
        pixels = up(height * pitch, ITEM_PIXELS)
        yield Area(1, height, width, pitch, height, pixels, vector, COPY_ROWS, 1, flat=True)
    rows = max(in_h, count_y)
    rows += rows * pitch % (4 // element)  # a loader's two pixels of 16 bits are of one image
    images = most_images(task, n, (count_y - 1) * pitch + width, rows * pitch)
    if images > 1:
        pixels = up(images * rows * pitch, ITEM_PIXELS)
        yield Area(images, count_y, width, pitch, rows, pixels, vector, COPY_ROWS, 1, flat=True)


def areas_copied(shape: Shape, n: int, vector: int, copy: int, start: int) -> Iterator[Area]:
    task = shape.task
    count_y, ys = shape.rows.count, shape.row_residues
    for row in rows_copied(shape, n, vector, copy, start):
        most = min(1 + (n - row.width) // row.columns, count_y)
        for height in {most, -(-count_y // -(-count_y // most))}:
            rows, lanes = height + ys.most // shape.lanes, shape.lanes
            if height == 1 and lanes > 1:
                rows, lanes = 1, ys.most + 1
            pixels = up(lanes * rows * row.pitch + row.overhang, ITEM_PIXELS)
            size = 1, height, row.width, row.pitch, rows, pixels
            yield Area(*size, vector, copy, start, lanes=lanes, strip=row.strip)
        used = (count_y - 1) * row.columns + row.width
        if shape.lanes > 1 or used > n:
            continue
        rows = ys.pitch(count_y, task.in_size[1], 0)
        images = most_images(task, n, used, rows * row.columns)
        if images > 1:
            over_rows = max(0, count_y + ys.most - rows)
            pixels = up((images * rows + over_rows) * row.pitch + row.overhang, ITEM_PIXELS)
            size = images, count_y, row.width, row.pitch, rows, pixels
            yield Area(*size, vector, copy, start, strip=row.strip)


class Row(NamedTuple):
    """How a row of a tile lies."""

    width: int
    """Lattice points."""
    columns: int
    """Accumulator columns from one row to the next,"""
    pitch: int
    """and pixels."""
    overhang: int
    """Pixels that the last row needs after that."""
    strip: int = GROUP


def rows_copied(shape: Shape, n: int, vector: int, copy: int, start: int) -> Iterator[Row]:
    in_w, count, xs = shape.task.in_size[2], shape.columns.count, shape.column_residues
    back = max(low - aligned(low, start) for low in xs.low.values())
    together = 4 // shape.task.element_bytes if copy >= COPY_BOXES else ITEM_PIXELS  # for a loader
    align = max(vector // gcd(vector, shape.columns.out_step), start, together)
    for width in widths(shape, n, vector, start):
        reach = width + xs.most + back
        pitch = up(xs.pitch(width, in_w, back) if width >= count else reach, align)
        yield Row(width, pitch, pitch, max(0, reach - pitch))
    if copy < COPY_BOXES or xs.most + back == 0:
        return
    total = -(-count // GROUP)
    for strips in sorted({-(-total // parts) for parts in range(1, total + 1)}):
        if strips * GROUP > n:
            break
        width = min(strips * GROUP, up(count, align))
        reach = min(width, GROUP) + xs.most + back
        strip = up(xs.pitch(width, in_w, back) if total == 1 else reach, max(start, together))
        if strip > GROUP:
            yield Row(width, strips * GROUP, strips * strip, max(0, reach - strip), strip)


def raw_rings(
    shape: Shape, area: Area, slice_blocks: int, reads: float
) -> Iterator[tuple[Box, int]]:
    """The TMA boxes of a tiling, and the bytes of the raw ring. `reads`: of 128 bytes, that the
    products of a slice take."""
    if area.copy < COPY_BOXES:
        yield Box(0, 0, 0, 0, 0), GATHER_BYTES
        return
    task = shape.task
    columns, rows = box_of(shape, area)
    group, residues, step = row_groups(shape, area)
    classes = channel_classes(task) if area.copy == COPY_ROWS else 1
    box_rows = -(-rows // residues)
    count = min(residues, rows) * classes
    block_bytes = task.block_channels * task.element_bytes
    block = columns * box_rows * area.images * block_bytes // classes  # of one box
    rings = list(reversed(BOX_RINGS[: 2 if count > 1 else 1]))
    total = task.in_channels // task.block_channels
    times = 128 * reads / (slice_blocks * block * count)
    if count == 1 and total >= BOX_SLICES * slice_blocks and times < MUCH_READ:
        rings = [(BOX_BEST, BOX_RINGS[0][1])]
    # Split numbers take twice the room in a box: larger rings are worth a look for all of them.
    if times < OFTEN_READ[count > 1] or task.split:
        large = LARGE_RINGS if times < RARELY_READ[count > 1] else ()
        rings = [*large, BOX_RINGS[1], *rings]
    depths: dict[int, set[int]] = {}
    for good, ring in rings:
        even = [b for b in (2, 4, 8) if slice_blocks % b == 0]
        blocks = max([b for b in even if b * block * count <= good], default=1)
        size = up(blocks * block, 128) * count
        depths.setdefault(blocks, set()).add(min(max(ring // size, 2), MAX_CHUNKS))
    # Of those expected to take as long the first is taken, which is the shortest ring: kb71 in BF16
    # takes 0.29 ms with three boxes on their way and 0.45 with four, others hardly differ.
    for blocks, counts in depths.items():
        stride = up(blocks * block, 128)
        for chunks in sorted(counts):
            every = box_rows, residues, classes, group.bit_length() - 1, step, stride
            box = Box(columns, rows, blocks, stride * count, chunks, *every)
            yield box, box.raw_bytes * chunks
