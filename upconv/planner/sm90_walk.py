"""The Hopper kernel that walks: layers in which neighbouring outputs meet the same taps.

These are layers of stride 1, forward and the input's gradient. (Where the stride divides the
dilation neighbours meet the same taps, too, but the outputs between them are the bias alone, and a
writer takes too long for those: measured, the kernel for all layers is faster.) The kernel
(csrc/cuda/sm90_walk.cuh) goes through the planes of an image, the rows where it has no depth, with
the sums of several planes of outputs at once. Left to choose are how many channels and pixels a
tile has, how wide strips of a plane are, through how many planes a unit of work walks, and whether
the weights of a group of channels stay in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import gcd, prod

from .candidate import Candidate, Refusal
from .operands import OPERANDS
from .problem import Hardware, Problem
from .sm90 import rounding_legality
from .sm90_cost import CLOCK_MHZ
from .sm90_walk_layer import OCTET, PIECE_BYTES, Layer, layer_of

KERNEL = "sm90_walk"

TILES = (
    (64, 3, 1, 3),
    (48, 3, 1, 3),
    (48, 3, 2, 3),
    (32, 3, 1, 3),
    (32, 3, 2, 3),
    (24, 3, 2, 3),
    (24, 3, 4, 3),
    (16, 3, 2, 3),
    (16, 3, 4, 3),
    (128, 1, 1, 3),
    (128, 1, 2, 3),
    (64, 1, 1, 3),
    (64, 1, 2, 3),
    (32, 3, 2, 7),
)
"""Channels of a tile, taps of the walk, blocks of 64 pixels that a warpgroup has, taps of a row:
UPCONV_WALK_TILES in csrc/cuda/sm90_walk.cu. Of 5 and 7 taps those that were faster than the kernel
for all layers."""
BLOCK, CONSUMERS = 64, 2
"""Pixels of a block, and warpgroups."""
STEP_BYTES = 32
"""Of K in one product."""
HEADER_BYTES = 1024 + 512 + CONSUMERS * (512 + 256)
MOST_STAGES = 16
LEAST_PIECES = 2
"""Of outputs that are laid down for a consumer's writer."""
STAGE_BYTES = 8 * 1024
"""Of a piece, but for what parts its channels."""
LEAST_BOXES, GOOD_BOXES, MOST_BOXES = 2, 3, 8
RING_BYTES = (96 * 1024, 64 * 1024, 40 * 1024)
"""Of weights that do not stay: the first of them that leaves room for boxes."""
MOST_BOX = 256
"""Elements along one dimension of what TMA brings."""
LEAST_STRIP, MOST_STRIP, MOST_ROWS = 3, MOST_BOX // OCTET - 2, 5
"""Octets, and rows of a warpgroup where rows are not shorter: many short rows, of a box and of
outputs, took up to three times as long. The most leave room for what a box has besides."""
INT = 2**31

LAUNCH = 6.1
"""Microseconds."""
UNIT_CYCLES = 1530.0
"""Of a unit of work besides its planes."""
STEP_FACTOR = 0.865
TURN_CYCLES = 160.0
"""From the start of some products to that of the next, of the same warpgroup, at least."""
STAGE_CYCLES = 135.0
"""Of a row of taps and a box, besides its products."""
WINDOW_CYCLES = 26.0
"""Of a turn, for each pixel of a window beyond those of three taps."""
ROW_CYCLES, LINE_CYCLES = 2.64, 0.59
"""That a row of a box takes, and each 128 bytes that it touches."""
PLANE_CYCLES = 209.0
"""Of a plane besides its products and outputs."""
SUM_CYCLES = 8.9
"""For each of a thread's sums, which move up after a plane. Both consumers do so at a time, and lay
down their outputs: their products do not hide it."""
LAY_CYCLES, SINGLE_CYCLES = 6.6, 9.7
"""For 4 bytes of outputs that a thread lays down; for an output that no other is stored with."""
STORE_CYCLES, SEGMENT_CYCLES = 14.1, 5.2
"""For an instruction of the writer, and for each row of the strip that it writes to."""
MOVED_BYTES = 2.8e6
"""That the memory takes and gives in a microsecond."""


@dataclass(frozen=True)
class Tiling:
    """How a layer is shared out."""

    layer: Layer
    channels: int
    many: int
    """Blocks of a warpgroup."""
    strip: int
    """Octets side by side."""
    chunk: int
    """Planes of a unit of work."""
    resident: bool
    weight_stages: int
    box_stages: int
    stage_pieces: int

    @property
    def problem(self) -> Problem:
        return self.layer.problem

    @property
    def element_bytes(self) -> int:
        return self.problem.element_bytes

    @property
    def columns(self) -> int:
        return self.channels * self.layer.axes[0].taps

    @property
    def steps(self) -> int:
        """Products that the channels of a box are enough for."""
        return 2 if self.many == 1 else 1

    @property
    def run(self) -> int:
        """Octets of a warpgroup."""
        return self.many * BLOCK // OCTET

    @property
    def rows(self) -> int:
        """That a run of octets touches, at most."""
        most_before = self.strip - gcd(self.strip, self.run)
        return (most_before + self.run - 1) // self.strip + 1

    @cached_property
    def box(self) -> tuple[int, int]:
        """Width, height: the smallest whose channels are read without bank conflicts.

        Lanes read four channels at a time, one or two apart: of a channel the 16-byte pieces must
        be an odd number, or twice an odd number. Lanes with 16-bit pixels read two octets at a
        time; where the second one may begin a row, a row must have an odd number.
        """
        piece, layer = PIECE_BYTES // self.element_bytes, self.layer
        _, rows, columns = layer.axes
        wide = layer.lead + self.strip * OCTET + columns.taps - 1
        high = self.rows + (rows.taps - 1) * rows.step
        pieces = -(-wide // piece)
        below = self.element_bytes == 2 and self.strip % 2 == 1
        sizes = product((pieces, pieces + 1), (high, high + 1))
        fit = ((w, h) for w, h in sizes if w * h % 4 and (w % 2 or not below))
        w, h = min(fit, key=prod)
        return w * piece, h

    @property
    def wide(self) -> int:
        """Strips of a plane."""
        return -(-self.layer.octets // self.strip)

    @property
    def runs(self) -> int:
        """Of a strip."""
        return -(-self.layer.axes[1].out_size * self.strip // self.run)

    @property
    def pairs(self) -> int:
        return -(-self.layer.problem.batch * self.wide * self.runs // CONSUMERS)

    @property
    def groups(self) -> int:
        return -(-self.layer.out_channels // self.channels)

    @property
    def units(self) -> int:
        return self.units_of(self.chunk)

    def units_of(self, chunk: int) -> int:
        return self.pairs * self.groups * -(-self.layer.axes[0].out_size // chunk)

    @property
    def box_channels(self) -> int:
        return self.steps * STEP_BYTES // self.element_bytes

    @property
    def depth(self) -> int:
        """Boxes that K has."""
        return -(-self.layer.in_channels // self.box_channels)

    @property
    def box_bytes(self) -> int:
        """Of a stage, as far as the next one."""
        return -(-prod(self.box) * self.steps * STEP_BYTES // 128) * 128

    @property
    def weight_bytes(self) -> int:
        """Of a stage: a row of taps and the channels of a box."""
        return self.columns * STEP_BYTES * self.steps * self.layer.axes[2].taps

    @property
    def all_stages(self) -> int:
        return self.depth * self.layer.axes[1].taps

    @property
    def stage_channels(self) -> int:
        """Of a piece of outputs that a warpgroup lays down: equal parts of a tile's."""
        row = self.many * BLOCK * self.element_bytes
        parts = (n for n in range(self.channels, 8, -8) if self.channels % n == 0)
        return next((n for n in parts if n * row <= STAGE_BYTES), 8)

    @property
    def stage_bytes(self) -> int:
        """Of both warpgroups."""
        pitch = self.many * BLOCK * self.element_bytes + PIECE_BYTES
        return CONSUMERS * self.stage_channels * pitch

    @property
    def pieces(self) -> int:
        """Of a plane."""
        return self.channels // self.stage_channels

    def microseconds(self, hardware: Hardware) -> float:
        """The longer of what a multiprocessor and the memory take."""
        layer = self.layer
        problem = layer.problem
        read = layer.in_channels * prod(axis.in_size for axis in layer.axes)
        stored = layer.out_channels * prod(axis.out_size for axis in layer.axes)
        moved = problem.batch * problem.element_bytes * (read + stored)
        return LAUNCH + max(self.cycles(hardware) / CLOCK_MHZ, moved / MOVED_BYTES)

    def cycles(self, hardware: Hardware) -> float:
        return self.cycles_of(self.chunk, self.plane_cycles(), hardware)

    def cycles_of(self, chunk: int, plane_cycles: float, hardware: Hardware) -> float:
        """Of the multiprocessor with most units of work, if each had so many planes."""
        units = self.units_of(chunk)
        workers = min(units, hardware.multiprocessors)
        if self.resident:
            workers -= workers % self.groups
        rounds = -(-units // workers)
        planes = chunk + self.layer.axes[0].taps - 1
        return rounds * (planes * plane_cycles + UNIT_CYCLES)

    def rank(self, hardware: Hardware) -> tuple[float, float]:
        """The less the better: where the memory decides, what leaves more time to spare."""
        return self.microseconds(hardware), self.cycles(hardware)

    def plane_cycles(self) -> float:
        """Products, with what brings their operands, and then outputs; or the writer."""
        taps, size, stages = self.layer.axes[2].taps, self.element_bytes, self.all_stages
        turns = self.many * self.steps
        products = CONSUMERS * turns * taps
        pairs = taps // 2 + 1  # of pixels, in a window
        rows_of_taps = self.layer.axes[1].taps  # for which a box is brought once
        port = CONSUMERS * turns * 16 * pairs + products * self.columns / 4
        port += CONSUMERS * self.box_bytes / 128 / rows_of_taps
        if not self.resident:
            port += self.weight_bytes / 128
        busy = max(products * self.columns / 2, port) * STEP_FACTOR
        alone = max(turns * TURN_CYCLES, turns * taps * self.columns / 2)
        width, height = self.box
        rows = CONSUMERS * self.box_channels * height / rows_of_taps
        brought = rows * (ROW_CYCLES + (width * size / 128 + 1) * LINE_CYCLES)
        each = max(busy, brought, alone) + STAGE_CYCLES + turns * (taps - 3) * WINDOW_CYCLES
        outputs = self.channels * self.many / 2  # of a thread
        after = PLANE_CYCLES + self.many * self.columns / 2 * SUM_CYCLES
        after += outputs * (size / 4 * LAY_CYCLES + (0 if self.paired else SINGLE_CYCLES))
        together = 64 if self.paired else 32  # pixels
        segments = max(1, together / (self.strip * OCTET))
        stores = self.channels * self.many * BLOCK / together
        return max(stages * each + after, stores * (STORE_CYCLES + segments * SEGMENT_CYCLES))

    @property
    def paired(self) -> bool:
        """Does the writer store two pixels at once?"""
        return self.layer.skew == 0 and self.layer.axes[2].out_size % 2 == 0


def refusal(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = rounding_legality(problem, hardware)
    if reason:
        return reason
    if problem.channels_last:
        return "reads the contiguous layout only"
    if problem.groups > 1:
        return "takes one group of channels"
    if max(problem.stride) > 1:
        return "takes stride 1 only"
    back = problem.direction == "grad_input"
    width = (problem.out_size if back else problem.in_size)[-1]
    if width * problem.element_bytes % PIECE_BYTES:
        return f"needs rows of a multiple of 16 bytes, not {width} numbers"
    if not fits(layer_of(problem)):
        return "takes 3 taps side by side in a row and 1 or 3 of the walk, one by one, or 7 and 3"
    pixels = problem.batch * max(prod(problem.in_size), prod(problem.out_size))
    weights = problem.in_channels * problem.out_channels * prod(problem.kernel)
    if pixels >= INT // 4 or weights >= INT // 4:
        return "images, a batch of them, or weights beyond its 32-bit sizes"
    return None


def fits(layer: Layer) -> bool:
    """Is there a form for the layer's taps?"""
    walk, _, columns = layer.axes
    if (walk.step > 1 and walk.taps > 1) or columns.step > 1:
        return False
    return any((walk.taps, columns.taps) == (tile[1], tile[3]) for tile in TILES)


def strips(layer: Layer, run: int) -> list[int]:
    """Widths, in octets, into which planes may be cut: in equal parts."""
    octets = layer.octets
    if layer.axes[1].out_size == 1:
        return [min(run, octets, MOST_STRIP)]
    least = max(LEAST_STRIP, run // MOST_ROWS)
    widths = range(min(octets, least), min(octets, MOST_STRIP) + 1)
    return [wide for wide in widths if -(-octets // -(-octets // wide)) == wide]


def tilings(problem: Problem, hardware: Hardware) -> Iterator[Tiling]:
    """Every tiling of a problem that `refusal` lets pass."""
    layer = layer_of(problem)
    walk, _, columns = layer.axes
    for channels, taps, many, wide in TILES:
        if (taps, wide) != (walk.taps, columns.taps):
            continue
        for strip in strips(layer, many * BLOCK // OCTET):
            sized = Tiling(layer, channels, many, strip, walk.out_size, False, 0, 0, 0)
            if max(sized.box) <= MOST_BOX:
                yield from chunked(sized, hardware)


def chunked(sized: Tiling, hardware: Hardware) -> Iterator[Tiling]:
    """In shares that keep all multiprocessors busy, with rings or weights that stay."""
    planes = sized.layer.axes[0].out_size
    shares = {-(-planes // parts) for parts in range(1, min(planes, 64) + 1)}
    for ringed in rings(sized, hardware):
        fitting = [c for c in shares if ringed.units_of(c) + hardware.multiprocessors < INT]
        if fitting:
            cycles = partial(
                ringed.cycles_of, plane_cycles=ringed.plane_cycles(), hardware=hardware
            )
            yield replace(ringed, chunk=min(fitting, key=lambda c: (cycles(c), -c)))


def rings(sized: Tiling, hardware: Hardware) -> Iterator[Tiling]:
    """Weights that stay or come in a ring, with as many pieces as leave room for boxes."""
    room = hardware.shared_memory - HEADER_BYTES

    def fitted(resident: bool, stages: int) -> Tiling | None:
        for least in (GOOD_BOXES, LEAST_BOXES):
            for pieces in range(max(sized.pieces, LEAST_PIECES), LEAST_PIECES - 1, -1):
                left = room - stages * sized.weight_bytes - pieces * sized.stage_bytes
                boxes = min(MOST_BOXES, left // (CONSUMERS * sized.box_bytes))
                if boxes >= least:
                    return replace(
                        sized,
                        resident=resident,
                        weight_stages=stages,
                        box_stages=boxes,
                        stage_pieces=pieces,
                    )
        return None

    if sized.all_stages <= MOST_STAGES and sized.groups <= hardware.multiprocessors:
        found = fitted(True, sized.all_stages)
        if found:
            yield found
    for bytes_ in RING_BYTES:
        stages = min(MOST_STAGES, bytes_ // sized.weight_bytes)
        found = fitted(False, stages) if stages >= 2 else None
        if found:
            yield found
            break


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = refusal(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    found = tilings(problem, hardware)
    best = min(found, key=lambda tiling: tiling.rank(hardware), default=None)
    if best is None:
        return Refusal(KERNEL, "its boxes and weights do not fit")
    held = "stay in shared memory" if best.resident else "come in a ring"
    walk = best.layer.axes[0]
    notes = (
        f"{best.units} walks of {CONSUMERS} x {best.many * BLOCK} pixels and {best.channels}"
        f" channels through {best.chunk} of {walk.out_size} planes, sums of {walk.taps} at a time",
        f"strips {best.strip * OCTET} pixels wide; boxes of {best.box[0]} x {best.box[1]},"
        f" {best.box_stages} on their way for each warpgroup; weights {held}",
    )
    return Candidate(KERNEL, best.microseconds(hardware), record(best), notes)


def fields(tiling: Tiling) -> dict[str, int]:
    """The scalars, in the order of csrc/cuda/sm90_walk_params.h."""
    layer = tiling.layer
    problem, axes = layer.problem, layer.axes
    taps = prod(problem.kernel)
    strides = (problem.out_channels * taps, taps)

    def named(prefix: str, names: str, name: str) -> dict[str, int]:
        return {f"{prefix}_{n}": getattr(a, name) for n, a in zip(names, axes, strict=True)}

    return {
        "operand": OPERANDS[problem.dtype],
        "tile_c": tiling.channels,
        "blocks": tiling.many,
        "resident": int(tiling.resident),
        "weight_stages": tiling.weight_stages,
        "box_stages": tiling.box_stages,
        "stage_pieces": tiling.stage_pieces,
        "strip": tiling.strip,
        "skew": layer.skew,
        "lead": layer.lead,
        "box_w": tiling.box[0],
        "box_h": tiling.box[1],
        "chunk": tiling.chunk,
        "batch": problem.batch,
        "in_channels": layer.in_channels,
        **named("in", "dhw", "in_size"),
        "out_channels": layer.out_channels,
        **named("out", "dhw", "out_size"),
        **named("kernel", "zyx", "taps"),
        "flipped": int(not layer.backward),
        **named("low", "zyx", "low"),
        "step_y": axes[1].step,
        "weight_in": strides[layer.backward],
        "weight_out": strides[not layer.backward],
    }


def record(tiling: Tiling) -> tuple[int, ...]:
    """The plan as integers."""
    return tuple(fields(tiling).values())
