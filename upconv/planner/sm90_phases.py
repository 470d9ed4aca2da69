"""The Hopper kernel for both phases of a row: stride 2, padding 1 and 3 or 4 taps in a row.

Generators of GANs have such layers, decoders, pose heads; forward and the input's gradient. Outputs
with even and with odd numbers are products of the same pixels with different taps, which the kernel
(csrc/cuda/sm90_phases.cuh) computes at once. Left to choose are how many channels and pixels a tile
has, the shape of the latter, and whether the weights of a group of channels stay in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from .candidate import Candidate, Refusal
from .operands import OPERANDS
from .problem import Hardware, Problem
from .sm90 import rounding_legality
from .sm90_cost import CLOCK_MHZ

KERNEL = "sm90_phases"

TILES = {"forward": ((128, 1), (64, 2), (64, 1)), "grad_input": ((256, 1), (128, 2), (128, 1))}
"""Channels of a tile, and blocks of 64 pixels that a warpgroup has: UPCONV_PHASES_*_TILES in
csrc/cuda/sm90_phases.cu."""
TAPS = (3, 4)
"""In a row."""
BLOCK, OCTET, CONSUMERS = 64, 8, 2
"""Pixels of a block, those that lie side by side at least, and warpgroups."""
STEP_BYTES = 32
"""Of K in one product."""
STEPS = {"forward": 2, "grad_input": 1}
"""Products that the channels of a box are enough for."""
PIECE_BYTES = 16
HEADER_BYTES = 1024 + CONSUMERS * 1024
MOST_STAGES = 16
LEAST_BOXES, MOST_BOXES = 2, 6
RING_BYTES = (128 * 1024, 96 * 1024)
"""Of weights that do not stay: the first of them that leaves room for boxes."""
MOST_BOX = 256
"""Elements along one dimension of what TMA brings."""
INT = 2**31

LAUNCH = 6.4
"""Microseconds; this and what follows as benchmarks/measure_pixels.py fits it."""
UNIT_CYCLES = 1040.0
"""Of a unit of work besides its products."""
STEP_FACTOR = 0.977
ROW_CYCLES = 3.5
"""That TMA takes for a row of a box, however short."""
TURN_CYCLES = 288.0
"""From the start of some products to that of the next but one, of the same warpgroup, at least."""
READ_BYTES = 2.84e6
"""That the memory gives in a microsecond."""
STORE_BYTES = 4.39e6
"""That it takes from all multiprocessors, which store at the same time."""


@dataclass(frozen=True)
class Tiling:
    """How a problem of three dimensions is shared out."""

    problem: Problem
    n: int
    many: int
    """Blocks of a warpgroup."""
    octets: int
    """Of pixels, side by side in a block; none for pixels of an image one after the other."""
    resident: bool
    weight_stages: int
    box_stages: int

    @property
    def backward(self) -> bool:
        return self.problem.direction == "grad_input"

    @property
    def grid(self) -> tuple[int, ...]:
        """Pixels: those of grad_input, or, going forward, all phases of an input pixel."""
        if self.backward:
            return self.problem.in_size
        pairs = zip(self.problem.out_size, self.problem.stride, strict=True)
        return tuple(-(-size // stride) for size, stride in pairs)

    @property
    def flat(self) -> bool:
        return self.octets == 0

    @property
    def rows(self) -> int:
        return 1 if self.flat else self.many * BLOCK // (self.octets * OCTET)

    @property
    def shape(self) -> str:
        wide = self.many * BLOCK // self.rows
        return f"{wide} successive" if self.flat else f"{self.rows} x {wide}"

    @property
    def blocks(self) -> int:
        depth, height, width = self.grid
        if self.flat:
            return self.problem.batch * depth * -(-height * width // (self.many * BLOCK))
        wide = -(-width // (self.octets * OCTET))
        return self.problem.batch * depth * -(-height // self.rows) * wide

    @cached_property
    def box(self) -> tuple[int, int, int]:
        """Width, height, depth: the smallest whose channels are read without bank conflicts.

        Lanes read four channels at a time, one or two apart: of a channel the 16-byte pieces must
        be an odd number, or twice an odd number. Lanes with 16-bit pixels read two octets at a
        time; where these lie below each other, a row must have an odd number.
        """
        problem, piece = self.problem, PIECE_BYTES // self.problem.element_bytes
        most = self.most_taps
        if self.backward:  # 16 bytes before, two numbers after
            wide, high = 2 * OCTET * self.octets + 2, problem.stride[1] * (self.rows - 1) + most[1]
        elif self.flat:  # all rows as one
            wide, high = self.many * BLOCK + (most[1] - 1) * problem.in_size[2] + 2, 1
        else:
            wide, high = OCTET * self.octets + 2, self.rows + most[1] - 1
        pieces = 1 + -(-wide // piece)
        below = self.octets == 1 and problem.element_bytes == 2 and not self.backward
        sizes = product(*((size, size + 1) for size in (pieces, high, most[0])))
        fit = ((w, h, d) for w, h, d in sizes if w * h * d % 4 and (w % 2 or not below))
        w, h, d = min(fit, key=prod)
        return w * piece, h, d

    @property
    def most_taps(self) -> tuple[int, int]:
        """Taps of the rows (depth, height) that a phase has."""
        kernel, stride = self.problem.kernel, self.problem.stride
        if self.backward:
            return kernel[0], kernel[1]
        return -(-kernel[0] // stride[0]), -(-kernel[1] // stride[1])

    @property
    def groups(self) -> int:
        return -(-columns(self.problem) // self.n)

    @property
    def row_phases(self) -> int:
        return 1 if self.backward else prod(self.problem.stride[:2])

    @property
    def units(self) -> int:
        return -(-self.blocks // CONSUMERS) * self.row_phases * self.groups

    @property
    def box_bytes(self) -> int:
        """Of a stage, as far as the next one."""
        return -(-prod(self.box) * box_k(self.problem) // 128) * 128

    @property
    def weight_bytes(self) -> int:
        return self.n * box_k(self.problem) * self.problem.kernel[2]

    @property
    def weight_pieces(self) -> int:
        """Of 16 bytes, that the packed weights of a channel have."""
        k = depth(self.problem) * box_k(self.problem) * self.problem.kernel[2]
        return self.row_phases * prod(self.most_taps) * k // PIECE_BYTES

    def microseconds(self, hardware: Hardware) -> float:
        """The products of a unit, and then its stores, which all multiprocessors do at once."""
        problem = self.problem
        inner = problem.in_channels * prod(problem.in_size)
        outer = problem.out_channels * prod(problem.out_size)
        read, stored = (outer, inner) if self.backward else (inner, outer)
        each = problem.batch * problem.element_bytes
        workers = min(self.units, hardware.multiprocessors)
        if self.resident:
            workers -= workers % (self.groups * self.row_phases)
        rounds = -(-self.units // workers)
        # Of the rows: going forward, phases share them.
        taps = prod(problem.kernel[:2]) / self.row_phases
        if self.resident:  # a multiprocessor keeps to a phase
            taps = prod(self.most_taps)
        cycles = rounds * (depth(problem) * self.box_cycles(taps) + UNIT_CYCLES)
        products = max(cycles / CLOCK_MHZ, each * read / READ_BYTES)
        return LAUNCH + products + each * stored / STORE_BYTES

    def box_cycles(self, taps: float) -> float:
        """What takes longest, for both consumers: tensor cores, shared memory, TMA, or waiting."""
        turns = self.many * taps * STEPS[self.problem.direction]
        products = CONSUMERS * turns * self.problem.kernel[2]
        loads = 96 if self.backward else 32 if self.problem.element_bytes == 4 else 48
        port = CONSUMERS * turns * loads + products * self.n / 4
        port += CONSUMERS * self.box_bytes / 128
        if not self.resident:
            port += taps * self.weight_bytes / 128
        channels = box_k(self.problem) // self.problem.element_bytes
        rows = CONSUMERS * channels * prod(self.box[1:])
        busy = max(products * self.n / 2, port) * STEP_FACTOR
        return max(busy, rows * ROW_CYCLES, turns * TURN_CYCLES)


def columns(problem: Problem) -> int:
    return problem.in_channels if problem.direction == "grad_input" else problem.out_channels


def box_k(problem: Problem) -> int:
    """Bytes of the channels of one pixel of a box."""
    return STEP_BYTES * STEPS[problem.direction]


def depth(problem: Problem) -> int:
    """Boxes that K has."""
    back = problem.direction == "grad_input"
    channels = problem.out_channels if back else problem.in_channels
    return -(-channels * problem.element_bytes // box_k(problem))


def refusal(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    if (problem.stride[-1], problem.padding[-1]) != (2, 1) or problem.kernel[-1] not in TAPS:
        return "takes stride 2, padding 1 and 3 or 4 taps in a row"
    reason = common_refusal(problem, hardware)
    if reason:
        return reason
    back = problem.direction == "grad_input"
    width = (problem.out_size if back else problem.in_size)[-1]
    if width * problem.element_bytes % PIECE_BYTES:
        return f"needs rows of a multiple of 16 bytes, not {width} numbers"
    if back and problem.in_size[-1] % 2:
        return f"needs rows of an even number of pixels, not {problem.in_size[-1]}"
    return None


def common_refusal(problem: Problem, hardware: Hardware) -> str | None:
    """What depends neither on the taps of a row nor on its length."""
    reason = rounding_legality(problem, hardware)
    if reason:
        return reason
    if problem.channels_last:
        return "reads the contiguous layout only"
    if problem.groups > 1:
        return "takes one group of channels"
    if any(d > 1 and k > 1 for d, k in zip(problem.dilation, problem.kernel, strict=True)):
        return "takes no dilation"
    pixels = problem.batch * max(prod(problem.in_size), prod(problem.out_size))
    weights = problem.in_channels * problem.out_channels * prod(problem.kernel)
    if pixels >= INT // 4 or weights >= INT // 4:
        return "images, a batch of them, or weights beyond its 32-bit sizes"
    return None


def tilings(problem: Problem, hardware: Hardware) -> Iterator[Tiling]:
    """Every tiling of a problem of three dimensions that fits."""
    for n, many in TILES[problem.direction]:
        for octets in (0, 1, 2, 4, 8, 16):
            sized = Tiling(problem, n, many, octets, False, 0, 0)
            whole_rows = sized.grid[2] == problem.in_size[2] and not sized.backward
            too_wide = octets > 8 * many or octets * OCTET >= 2 * max(OCTET, sized.grid[2])
            if too_wide or (sized.flat and not whole_rows) or max(sized.box) > MOST_BOX:
                continue
            # Phases are as many as the steps between rows, however few of them have outputs.
            if max(sized.units + hardware.multiprocessors, sized.weight_pieces) < INT:
                yield from rings(sized, hardware)


def rings(sized: Tiling, hardware: Hardware) -> Iterator[Tiling]:
    """Weights that stay, and weights that come in a ring."""
    room = hardware.shared_memory - HEADER_BYTES

    def boxes(stages: int) -> int:
        left = room - stages * sized.weight_bytes
        return min(MOST_BOXES, left // (CONSUMERS * sized.box_bytes))

    all_stages = depth(sized.problem) * prod(sized.most_taps)
    alone = sized.groups * sized.row_phases <= hardware.multiprocessors
    if all_stages <= MOST_STAGES and boxes(all_stages) >= LEAST_BOXES and alone:
        stays = replace(sized, resident=True)
        yield replace(stays, weight_stages=all_stages, box_stages=boxes(all_stages))
    for bytes_ in RING_BYTES:
        stages = min(MOST_STAGES, bytes_ // sized.weight_bytes)
        if boxes(stages) >= LEAST_BOXES:
            yield replace(sized, weight_stages=stages, box_stages=boxes(stages))
            break


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = refusal(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    found = tilings(problem.in_three(), hardware)
    best = min(found, key=lambda tiling: tiling.microseconds(hardware), default=None)
    if best is None:
        return Refusal(KERNEL, "its boxes, weights or phases do not fit")
    held = "stay in shared memory" if best.resident else "come in a ring"
    notes = (
        f"both phases of a row at once: {best.units} tiles of {CONSUMERS} x {best.shape} pixels and"
        f" {best.n} channels, K of {depth(problem)} x {box_k(problem)} bytes",
        f"boxes of {' x '.join(map(str, best.box))}, {best.box_stages} on their way for each"
        f" warpgroup; weights {held}",
    )
    return Candidate(KERNEL, best.microseconds(hardware), record(best), notes)


def fields(tiling: Tiling) -> dict[str, int]:
    """The scalars, in the order of csrc/cuda/sm90_phases_params.h."""
    problem = tiling.problem
    box_w, box_h, box_d = tiling.box
    return {
        "operand": OPERANDS[problem.dtype],
        "backward": int(tiling.backward),
        "tile_n": tiling.n,
        "blocks": tiling.many,
        "resident": int(tiling.resident),
        "weight_stages": tiling.weight_stages,
        "box_stages": tiling.box_stages,
        "flat": int(tiling.flat),
        "octets": max(1, tiling.octets),
        "box_w": box_w,
        "box_h": box_h,
        "box_d": box_d,
        "batch": problem.batch,
        "in_channels": problem.in_channels,
        **{f"in_{name}": size for name, size in zip("dhw", problem.in_size, strict=True)},
        "out_channels": problem.out_channels,
        **{f"out_{name}": size for name, size in zip("dhw", problem.out_size, strict=True)},
        **{f"kernel_{name}": size for name, size in zip("zyx", problem.kernel, strict=True)},
        **{f"stride_{name}": size for name, size in zip("zy", problem.stride[:2], strict=True)},
        **{f"pad_{name}": size for name, size in zip("zy", problem.padding[:2], strict=True)},
    }


def record(tiling: Tiling) -> tuple[int, ...]:
    """The plan as integers."""
    return tuple(fields(tiling).values())
