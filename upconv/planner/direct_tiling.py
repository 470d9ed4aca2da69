"""How the CUDA-core kernel divides its points: tiles, shared memory, blocks, and the cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from .direct_shape import Convolution, Rows
from .problem import ELEMENT_BYTES, Hardware

BLOCK_WARPS = (4, 2, 1)
FLOAT_TILES = {1: 8, 2: 8, 4: 8, 8: 8, 9: 8, 12: 6}
DOUBLE_TILES = {1: 4, 4: 4, 8: 4}
LONG_TILES = {1: 8, 4: 8, 8: 4, 9: 4}
"""Rows of a thread: points of a thread. The kernel is compiled for these."""
WARPS_TOGETHER = 16
"""Warps that share a multiprocessor, at 128 registers a thread: blocks hide each other's fill and
stores. Shared memory is divided so that all of them find room."""
MOST_REPEATS = 8
"""Tiles of one block, at most: its weights are then read that much less often."""
BLOCKS_IN_LINE = 16
"""Blocks a multiprocessor gets, at least, before a block takes more than one tile."""
PARTS = (1, 2, 3, 4, 6, 8)
"""Pieces that a row of points may be cut into, besides pieces of some 32, 64 or most points."""

CLOCK_MHZ = 1900.0
DRAM_BYTES = 9.9
"""Bytes a cycle and multiprocessor: what a kernel that writes most of its traffic reached on an
H200, a little over half of the rate of a copy."""
PARTIAL_STORES = 1.2
"""How much longer outputs take whose sectors are written in two parts: 0.202 ms against 0.175 for
268 MB, 0.088 against 0.075 for 176 MB."""
CUT_BYTES = 128
"""That count twice where a row is cut: 0.087 ms for rows of 2 KB in two pieces, 0.075 whole."""
UNHIDDEN = 0.1
"""Share of the shorter of arithmetic and traffic that does not hide behind the longer."""
LAUNCH_MICROSECONDS = 11.0
CONVERTED = 1.2
"""How much longer 16-bit types take than the rule says: 0.8 to 3.0 times over 25 drawn layers that
suit the kernel, 1.24 at the median; float32 takes 1.04 times."""
PRODUCT_ISSUE, OTHER_ISSUE = 0.53, 0.78
"""Share of the issue slots that are used where nothing else limits."""
CROWDED_CYCLES, LONE_CYCLES = 6.6, 2.4
"""From one instruction of a warp to its next, among other blocks and without them."""
FILL_CYCLES = 900.0
"""Until the tile has come from memory."""
# Fitted to 522 runs of 33 layers on an H200, with a standard deviation of 18 %; of the tilings that
# were measured of a layer, the rule picks one that takes 3 % more than the best, in geometric mean.
# What concerns straight stores, cut rows and hiding: adjusted to 270 later runs of 7 layers (11 %,
# picks 2 % above the best).
# The clock is that of light load: these layers do not heat the chip.


def tiles_of(convolution: Convolution) -> dict[int, int]:
    if convolution.set_aside:
        return LONG_TILES
    return DOUBLE_TILES if convolution.dtype == "float64" else FLOAT_TILES


def padded(rows: int) -> int:
    """Words that one row of weights takes, so that it can be read as whole vectors."""
    return -(-rows // 4) * 4 if rows > 2 else rows


def step_instructions(rows: int, points: int) -> float:
    """Of a warp, for one input channel and offset."""
    return rows * points + points + padded(rows) / 4 + 4


def least_cycles(rows: Rows) -> float:
    """Of all multiprocessors together, for the products alone, if every point were an output's."""
    convolution = rows.convolution
    points = tiles_of(convolution)[rows.rows]
    entries = sum(len(kind.shifts) for kind in rows.kinds) * rows.channel_blocks
    entries *= convolution.in_channels * convolution.groups * convolution.batch
    warps = prod(axis.points for axis in convolution.axes) / (32 * points)
    return entries * warps * step_instructions(rows.rows, points) / 4


@dataclass(frozen=True)
class Tiling:
    rows: Rows
    warps: int
    row_warps: int
    tile: tuple[int, int, int]
    chunk: int
    multiprocessors: int
    room: int
    """Shared memory of a multiprocessor that blocks can have."""
    straight: int
    """Elements of one store straight from the registers; 0: sums go through shared memory."""

    @property
    def convolution(self) -> Convolution:
        return self.rows.convolution

    @property
    def sum_bytes(self) -> int:
        return 8 if self.convolution.dtype == "float64" else 4

    @cached_property
    def points(self) -> int:
        """Points of a thread."""
        return tiles_of(self.convolution)[self.rows.rows]

    @cached_property
    def block_points(self) -> int:
        return self.warps // self.row_warps * 32 * self.points

    @property
    def line(self) -> int:
        """Words of one line of sums. Eight width phases get 4 words after every 32, without which
        the lanes of a warp would meet in the same banks."""
        words = self.block_points * self.rows.width
        return words + words // 8 if self.rows.width == 8 else words

    # --- the tile in shared memory

    @cached_property
    def extent(self) -> tuple[int, int, int]:
        """Slabs, rows and pitch of the tile, margins included."""
        z, y, x = (
            size + axis.margin for size, axis in zip(self.tile, self.convolution.axes, strict=True)
        )
        return z, y, x

    @property
    def plane(self) -> int:
        return prod(self.extent)

    def offset(self, shift: tuple[int, int, int]) -> int:
        """Where a point finds its input, from the point's own position."""
        _, rows, pitch = self.extent
        residue, place = 0, []
        for axis, s in zip(self.convolution.axes, shift, strict=True):
            residue = residue * axis.in_step + s % axis.in_step
            place.append(s // axis.in_step - axis.low)
        return residue * self.plane + (place[0] * rows + place[1]) * pitch + place[2]

    @cached_property
    def channel(self) -> int:
        """Positions of one channel, and those that points past the last margin read."""
        residues = prod(axis.in_step for axis in self.convolution.axes)
        highest = tuple(
            (axis.low + axis.margin) * axis.in_step + axis.in_step - 1
            for axis in self.convolution.axes
        )
        reach = self.block_points + self.offset((highest[0], highest[1], highest[2]))
        return max(residues * self.plane, reach)

    @property
    def most_taps(self) -> int:
        return len(self.rows.kinds[0].shifts)

    def bytes_with(self, chunk: int) -> int:
        weights = self.row_warps * (1 + chunk * self.most_taps) * padded(self.rows.rows)
        stage = self.row_warps * (self.rows.rows // self.rows.width) * self.line
        if self.straight:
            stage = 0
        taps = 2 * self.row_warps * self.most_taps * self.rows.folds * self.rows.width
        words = -(-weights // 4) * 4 + max(chunk * self.channel, stage)
        return -(-taps // 16) * 16 + self.sum_bytes * words

    @property
    def chunks(self) -> int:
        return -(-self.convolution.in_channels // self.chunk)

    @property
    def shared_bytes(self) -> int:
        return self.bytes_with(self.chunk)

    @cached_property
    def vector(self) -> int:
        """Elements of one store: as many as start on their own multiple in every row."""
        if self.straight:
            return self.straight
        x = self.convolution.axes[2]
        together = self.rows.width == x.phases == x.out_step
        for vector in (4, 2):
            if vector * self.element_bytes > 16:
                continue
            steps = [x.first, x.out_size]
            if together:  # the phases of neighbouring points follow each other without a gap
                steps += [self.tile[2] * x.out_step, self.extent[2] * x.out_step]
            else:
                steps += [self.rows.width, x.out_step, x.phases]
            if all(step % vector == 0 for step in steps):
                return vector
        return 1

    # --- the work

    @cached_property
    def tiles(self) -> tuple[int, int, int]:
        z, y, x = (
            -(-axis.points // size)
            for axis, size in zip(self.convolution.axes, self.tile, strict=True)
        )
        return z, y, x

    @property
    def units(self) -> int:
        return self.convolution.batch * prod(self.tiles)

    @property
    def row_blocks(self) -> int:
        return -(-len(self.rows.kinds) * self.rows.channel_blocks // self.row_warps)

    @cached_property
    def repeats(self) -> int:
        """Tiles of one block."""
        total = self.units * self.convolution.groups * self.row_blocks
        spare = total // (self.multiprocessors * BLOCKS_IN_LINE)
        return max(1, min(MOST_REPEATS, spare, self.units))

    @property
    def blocks(self) -> int:
        return -(-self.units // self.repeats)

    # --- the cost

    @cached_property
    def row_lanes(self) -> int:
        """Lanes that store one row of the tile: 128 bytes, or what the row has. With fewer, a warp
        writes to many lines at once, each of them in parts: up to twice the time."""
        wanted = min(self.tile[2] * self.rows.width, 128 // self.element_bytes)
        return next((n for n in (4, 8, 16) if n * self.vector >= wanted), 32)

    @property
    def store_instructions(self) -> float:
        """Of one warp, to store its rows of the tile."""
        shape = self.rows
        if self.straight:
            line = 8 + shape.width // self.straight * 10 + shape.width // 2
            return self.points * (24 + shape.folds * shape.channels * line)
        rows = self.tile[0] * self.tile[1]
        passes = ceil(rows / (self.warps // self.row_warps * (32 // self.row_lanes)))
        pieces = ceil(self.tile[2] * shape.width / (self.row_lanes * self.vector))
        gapless = shape.width == self.convolution.axes[2].out_step
        line = 14 + pieces * (10 if gapless else 35)
        return passes * (45 + shape.folds * (35 + shape.channels * line))

    @cached_property
    def instructions(self) -> dict[str, float]:
        """Of all warps for one tile and all rows of a group, in words that `explain` prints."""
        shape, convolution = self.rows, self.convolution
        rows, points = shape.rows, self.points
        warps = self.warps // self.row_warps
        sets = len(shape.kinds) * shape.channel_blocks
        tapped = sum(bool(kind.shifts) for kind in shape.kinds) * shape.channel_blocks
        positions = self.plane * prod(axis.in_step for axis in convolution.axes)
        each = 7 if self.sum_bytes == self.element_bytes else 10
        copy = 40 * self.chunks + each * convolution.in_channels
        reuse = self.repeats if self.chunk >= convolution.in_channels else 1
        stores = self.store_instructions
        if not self.straight:
            stores += 105 + 3.5 * rows * points
        return {
            "the products": self.entries * warps * step_instructions(rows, points),
            "filling the tile": -(-tapped // self.row_warps) * ceil(positions / 32) * copy,
            "the weights": self.entries * rows * 25 / 32 / reuse,
            "the stores": sets * warps * stores,
        }

    @cached_property
    def entries(self) -> int:
        """Inputs that the threads of one point read, over all sets of rows."""
        offsets = sum(len(kind.shifts) for kind in self.rows.kinds) * self.rows.channel_blocks
        return offsets * self.convolution.in_channels

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.convolution.dtype]

    @cached_property
    def cycles(self) -> dict[str, float]:
        """Of a multiprocessor for one tile and all rows of a group, when it is fully occupied."""
        issue = {name: n / 4 / OTHER_ISSUE for name, n in self.instructions.items()}
        words = self.entries * (self.points + self.rows.rows) * self.sum_bytes / 4
        reading = words * (self.warps // self.row_warps)
        products = self.instructions["the products"] / 4 / PRODUCT_ISSUE
        return issue | {"the products": max(products, reading)}

    @cached_property
    def microseconds(self) -> float:
        convolution = self.convolution
        outputs: float = convolution.out_channels * prod(axis.out_size for axis in convolution.axes)
        inputs = convolution.in_channels * prod(axis.in_size for axis in convolution.axes)
        if not self.straight and self.tiles[2] > 1:
            row = self.tile[2] * convolution.axes[2].out_step * self.element_bytes
            outputs *= 1 + CUT_BYTES / row
        if 0 < self.straight < self.rows.width:
            outputs *= PARTIAL_STORES
        elements = convolution.batch * convolution.groups * (outputs + inputs)
        traffic = elements * self.element_bytes / DRAM_BYTES / self.multiprocessors
        shorter, longer = sorted((self.busy_cycles, traffic))
        factor = CONVERTED if self.element_bytes == 2 else 1.0
        return factor * (longer + UNHIDDEN * shorter) / CLOCK_MHZ + LAUNCH_MICROSECONDS

    @property
    def busy_cycles(self) -> float:
        """Waves of blocks, each as long as the multiprocessor is busy or as one warp takes; the
        blocks of the last one have it almost to themselves."""
        block = sum(self.cycles.values()) * self.repeats / self.row_blocks
        chain = sum(self.instructions.values()) * self.repeats / self.row_blocks / self.warps
        waiting = self.chunks * self.repeats * FILL_CYCLES
        together = max(1, (self.room + 1024) // (self.shared_bytes + 1024))
        warps = WARPS_TOGETHER if self.rows.rows > 4 else WARPS_TOGETHER + 4
        together = min(warps // self.warps, together)
        blocks = self.convolution.groups * self.row_blocks * self.blocks
        waves, rest = divmod(blocks, self.multiprocessors * together)
        busy = waves * max(chain * CROWDED_CYCLES + waiting, together * block)
        last = max(chain * LONE_CYCLES + waiting, ceil(rest / self.multiprocessors) * block)
        return busy + (last if rest else 0.0)

    @property
    def notes(self) -> tuple[str, ...]:
        shape, cycles = self.rows, self.cycles
        most = max(cycles, key=lambda name: cycles[name])
        tile = "x".join(str(size) for size in self.tile)
        return (
            f"a thread adds up {shape.rows} outputs ({shape.channels} channels, {shape.folds} row"
            f" and {shape.width} width phases) at {self.points} points;"
            f" {self.warps} warps take tiles of {tile} points,"
            f" {self.chunk} input channels at a time",
            f"most of the time goes into {most}",
        )


def tilings(rows: Rows, hardware: Hardware) -> Iterator[Tiling]:
    """Every way to cut the points that is worth a look."""
    sets = len(rows.kinds) * rows.channel_blocks
    for warps in BLOCK_WARPS:
        for row_warps in (1, 2, 4):
            if row_warps > min(warps, sets):
                break
            points = warps // row_warps * 32 * tiles_of(rows.convolution)[rows.rows]
            for tile in tile_choices(rows.convolution, points):
                for straight in straight_stores(rows):
                    tiling = with_chunk(rows, (warps, row_warps), tile, straight, hardware)
                    if tiling is not None:
                        yield tiling


def straight_stores(rows: Rows) -> tuple[int, ...]:
    """Elements of a store from registers, where threads have all width phases of their points and
    a store takes all of them. With half of them in each, shared memory (0) may be faster."""
    x, width = rows.convolution.axes[2], rows.width
    if width == 1 or not width == x.phases == x.out_step or rows.rows not in (2, 4, 8):
        return (0,)
    most = next(v for v in (8, 4, 2, 1) if x.first % v == x.out_size % v == width % v == 0)
    vector = min(most, 16 // ELEMENT_BYTES[rows.convolution.dtype])
    if vector == width:
        return (vector,)
    return (vector, 0) if 2 * vector == width else (0,)


def tile_choices(convolution: Convolution, points: int) -> list[tuple[int, int, int]]:
    """Tiles of at most `points` points, numbered straight through with the margins between."""
    z, y, x = convolution.axes
    pieces = {*PARTS, *(-(-x.points // size) for size in (30, 62, points))}
    widths = {-(-x.points // parts) for parts in pieces}
    if x.first % 2 == 0 and x.out_size % 2 == 0:  # stores can be vectors
        widths |= {-(-width // 4) * 4 for width in widths}
    result = set()
    for width in widths:
        if width > points:
            continue
        pitch = width + x.margin
        height = min(y.points, (points - width) // pitch + 1)
        height = -(-y.points // -(-y.points // height))
        slab = (height + y.margin) * pitch
        depth = min(z.points, (points - (height - 1) * pitch - width) // slab + 1)
        result.add((-(-z.points // -(-z.points // depth)), height, width))
    return sorted(result) or [(1, 1, points)]


def with_chunk(
    rows: Rows,
    warps: tuple[int, int],
    tile: tuple[int, int, int],
    straight: int,
    hardware: Hardware,
) -> Tiling | None:
    """The tiling with as many channels at a time as leave room for other blocks."""
    channels = rows.convolution.in_channels
    rest = (hardware.multiprocessors, hardware.shared_memory, straight)
    one = Tiling(rows, *warps, tile, 1, *rest)
    room = (hardware.shared_memory + 1024) * warps[0] // WARPS_TOGETHER - 1024
    if one.bytes_with(1) > room:
        room = hardware.shared_memory
    if one.bytes_with(1) > room:
        return None
    each = one.bytes_with(channels + 1) - one.bytes_with(channels)
    chunk = max(1, min(channels, room // max(each, 1)))
    while chunk > 1 and one.bytes_with(chunk) > room:
        chunk -= 1
    chunk = -(-channels // -(-channels // chunk))
    return Tiling(rows, *warps, tile, chunk, *rest)
