"""The Hopper kernel for patches: layers whose kernel is their stride, and their input's gradient.

Every input pixel becomes a patch of outputs of its own, so that the layer is one matrix product of
pixels and (channels, taps). The kernel (csrc/cuda/sm90_patch.cuh) takes 64 pixels for each of two
warpgroups and `n` columns, and goes through K, 128 bytes for each pixel at a time. What is left to
choose is the number of columns, and whether the weights of a group of columns stay in shared memory
or come in a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from .candidate import Candidate, Refusal
from .operands import OPERANDS, SPLIT
from .problem import Hardware, Problem
from .sm90 import legality
from .sm90_cost import CLOCK_MHZ

KERNEL = "sm90_patch"

TILES = (256, 128, 64)
"""Columns of a tile: UPCONV_PATCH_TILES in csrc/cuda/sm90_patch.cu."""
STRICT_TILES = TILES[1:]
"""The same for float32 that must not be rounded, which takes two registers for each output."""
BLOCK, CONSUMERS = 64, 2
"""Pixels of a warpgroup, and warpgroups."""
ROW_BYTES = 128
"""Of a pixel's K in one stage; also of a channel in a box."""
STEPS, STRICT_STEPS = 4, 6
"""Products of a stage, 32 bytes of K of the weights each."""
BOX_BYTES = BLOCK * ROW_BYTES
PAIRED_BYTES = BLOCK * (ROW_BYTES + 16)
"""Of a box where two channels are a row: 8 bytes before a block, and 8 behind it."""
SHORT_PART = 16
"""Pixels of 16 bits whose taps, of 2 x 2 patches, are 128 bytes of grad_output."""
HEADER_BYTES = 1024 + CONSUMERS * 1024
MOST_STAGES = 16
RING_BYTES = 128 * 1024
"""Of weights that do not stay."""
LEAST_BOXES, MOST_BOXES = 3, 6
MOST_DEPTH = 65535 // (2 * STRICT_STEPS)
"""Stages of K: the kernels that pack have two rows of their grid for each product of one."""
INT = 2**31

LAUNCH = 6.05
"""Microseconds."""
UNIT_CYCLES = 327.0
"""Of a unit of work besides its stages."""
CUT_CYCLES, CUT_FACTOR = 400.0, 1.106
"""Where numbers are cut in two: of a stage, and of its products, which issue less often."""
STAGE_FACTOR = 0.973
READ_BYTES = 3.85e6
"""That the memory gives in a microsecond."""
HIDDEN = 0.099
"""Of the shorter of reading and multiplying, what the longer does not hide."""
STORE_BYTES = 4.39e6
"""That it takes from all multiprocessors, which store at the same time."""


@dataclass(frozen=True)
class Tiling:
    """How a problem of three dimensions is shared out."""

    problem: Problem
    n: int
    resident: bool
    weight_stages: int
    box_stages: int

    @property
    def backward(self) -> bool:
        return self.problem.direction == "grad_input"

    @property
    def rest_pixels(self) -> int:
        """Of an image, in a block of what is left over of several images."""
        rest = prod(self.problem.in_size) % BLOCK
        least = 16 // self.problem.element_bytes
        return max(least, 1 << (rest - 1).bit_length()) if rest else BLOCK

    @property
    def blocks(self) -> int:
        pixels, batch = prod(self.problem.in_size), self.problem.batch
        if self.problem.channels_last:  # images follow each other
            return -(-batch * pixels // BLOCK)
        if self.backward:  # in parts
            *slices, height, width = self.problem.in_size
            rows, part = short_rows(self.problem), row_part(self.problem)
            parts, each = -(-width // part) * height, BLOCK // part
            if rows:
                parts, each = -(-height // rows), BLOCK // SHORT_PART
            return -(-batch * prod(slices) * parts // each)
        rest = -(-batch // (BLOCK // self.rest_pixels)) if pixels % BLOCK else 0
        return batch * (pixels // BLOCK) + rest

    @property
    def groups(self) -> int:
        return -(-columns(self.problem) // self.n)

    @property
    def units(self) -> int:
        return -(-self.blocks // CONSUMERS) * self.groups

    def microseconds(self, hardware: Hardware) -> float:
        """The products of a unit, and then its stores, which all multiprocessors do at once."""
        problem = self.problem
        inner = problem.in_channels * prod(problem.in_size)
        outer = problem.out_channels * prod(problem.out_size)
        read, stored = (outer, inner) if self.backward else (inner, outer)
        each = problem.batch * problem.element_bytes
        workers = min(self.units, hardware.multiprocessors)
        if self.resident:
            workers -= workers % self.groups
        rounds = -(-self.units // workers)
        cycles = rounds * (depth(problem) * self.stage_cycles * STAGE_FACTOR + UNIT_CYCLES)
        products, reading = cycles / CLOCK_MHZ, each * read / READ_BYTES
        busy = max(products, reading) + HIDDEN * min(products, reading)
        return LAUNCH + busy + each * stored / STORE_BYTES

    @property
    def stage_cycles(self) -> float:
        """Of the tensor cores, or of the port of shared memory, for both consumers."""
        products = CONSUMERS * steps(self.problem)
        port = products * (16 + self.n / 4) + CONSUMERS * box_bytes(self.problem) / 128
        if not self.resident:
            port += self.n * steps(self.problem) / 4
        busy = max(products * self.n / 2, port)
        return busy * CUT_FACTOR + CUT_CYCLES if self.problem.strict else busy


def steps(problem: Problem) -> int:
    """Products of a stage."""
    return STRICT_STEPS if problem.strict else STEPS


def columns(problem: Problem) -> int:
    if problem.direction == "grad_input":
        return problem.in_channels
    return problem.out_channels * prod(problem.kernel)


def paired(problem: Problem) -> bool:
    """Whether two channels of x are a row: TMA takes no planes of an odd number of 8 bytes."""
    forward = problem.direction == "forward" and not problem.channels_last
    return forward and prod(problem.in_size) * problem.element_bytes % 16 != 0


def box_bytes(problem: Problem) -> int:
    return PAIRED_BYTES if paired(problem) else BOX_BYTES


def row_part(problem: Problem) -> int:
    """Pixels whose taps are 128 bytes of a row of grad_output."""
    return ROW_BYTES // problem.kernel[-1] // problem.element_bytes


def short_rows(problem: Problem) -> int:
    """Rows of x that are a part of the gradient; 0 where a part is of one row.

    Whatever is below them is one run of grad_output. Never more blocks than with parts of one row:
    these are half full at most where rows are as short.
    """
    if problem.direction != "grad_input" or problem.kernel[-2:] != (2, 2):
        return 0
    height, width = problem.in_size[-2:]
    if problem.element_bytes != 2 or width % 2 or width > SHORT_PART:
        return 0
    return min(SHORT_PART // width, height)


def depth(problem: Problem) -> int:
    """Stages that K has."""
    element = problem.element_bytes
    if problem.direction == "grad_input":
        together = prod(problem.kernel[-2:]) if short_rows(problem) else problem.kernel[-1]
        stages = -(-problem.out_channels * together * element // ROW_BYTES)
        return stages * (prod(problem.kernel) // together)
    return -(-problem.in_channels * element // ROW_BYTES)


def refusal(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = legality(problem, hardware)
    if reason:
        return reason
    if problem.channels_last and problem.direction != "forward":
        return "reads the contiguous layout only, for gradients"
    if problem.channels_last and problem.strict:
        return "reads the contiguous layout only, where float32 must not be rounded"
    if problem.groups > 1:
        return "takes one group of channels"
    if problem.kernel != problem.stride:
        return "takes layers whose kernel is their stride"
    # Where the kernel is 1, its dilation means nothing.
    spread = any(d > 1 and k > 1 for d, k in zip(problem.dilation, problem.kernel, strict=True))
    if any(problem.padding) or any(problem.output_padding) or spread:
        return "takes no padding, output padding or dilation"
    width, element = problem.in_size[-1], problem.element_bytes
    if problem.direction != "forward":
        if problem.kernel[-1] != 2:
            return f"takes patches 2 wide, not {problem.kernel[-1]}, for gradients"
        if width * 2 * element % 16 and not short_rows(problem):
            return f"needs rows of a multiple of {8 // element} pixels, not {width}"
    elif not problem.channels_last:
        if problem.kernel[-1] % 4 and problem.kernel[-1] != 2:
            return f"takes patches 2, or a multiple of 4, wide, not {problem.kernel[-1]}"
        if width % 2:
            return f"needs rows of an even number of pixels, not {width}"
        if prod(problem.in_size) % 4:
            return f"needs images of a multiple of 4 pixels, not {prod(problem.in_size)}"
        if paired(problem) and problem.in_channels % 2:
            return "needs images of a multiple of 16 bytes where the number of channels is odd"
    pixels, channels = prod(problem.in_size), TILES[0] // prod(problem.kernel) + 2  # of a tile
    if (
        channels * prod(problem.out_size) // 2 >= 2 * INT - 1
        or problem.batch * pixels >= INT - 4 * BLOCK
    ):
        return "images, or a batch of them, beyond its 32-bit sizes"
    if columns(problem) * 2 >= INT or depth(problem) > MOST_DEPTH:
        return "too many channels and taps for its sizes"
    return None


def tilings(problem: Problem, hardware: Hardware) -> Iterator[Tiling]:
    """Every tiling of a problem of three dimensions that fits."""
    room = hardware.shared_memory - HEADER_BYTES
    for n in STRICT_TILES if problem.strict else TILES:
        stage = n * steps(problem) * 32
        for resident in (True, False):
            stages = depth(problem) if resident else RING_BYTES // stage
            boxes = min(MOST_BOXES, (room - stages * stage) // (CONSUMERS * box_bytes(problem)))
            tiling = Tiling(problem, n, resident, stages, boxes)
            many = tiling.groups > hardware.multiprocessors
            if stages <= MOST_STAGES and boxes >= LEAST_BOXES and not (resident and many):
                yield tiling


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = refusal(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    found = tilings(problem.in_three(), hardware)
    best = min(found, key=lambda tiling: tiling.microseconds(hardware))
    held = "stay in shared memory" if best.resident else "come in a ring"
    notes = (
        f"one product: {best.blocks * BLOCK} pixels, {columns(problem)} columns, K of"
        f" {depth(best.problem)} x {ROW_BYTES} bytes",
        f"{best.units} tiles of {CONSUMERS} x {BLOCK} pixels and {best.n} columns; weights {held},"
        f" {best.box_stages} boxes on their way for each warpgroup",
        *form_notes(best.problem),
    )
    return Candidate(KERNEL, best.microseconds(hardware), record(best), notes)


def form_notes(problem: Problem) -> Iterator[str]:
    """What sets a problem's form apart from the plain one."""
    if problem.strict:
        yield "float32 as two FP16 numbers, scaled pixel by pixel"
    if paired(problem):
        yield "two channels are one row of TMA's: a channel is no multiple of 16 bytes"
    if rows := short_rows(problem):
        yield f"{rows} whole rows of the input, or what is left, are a part of a block"


def fields(tiling: Tiling) -> dict[str, int]:
    """The scalars, in the order of csrc/cuda/sm90_patch_params.h."""
    problem = tiling.problem
    return {
        "operand": SPLIT if problem.strict else OPERANDS[problem.dtype],
        "channels_last": int(problem.channels_last),
        "backward": int(tiling.backward),
        "tile_n": tiling.n,
        "resident": int(tiling.resident),
        "weight_stages": tiling.weight_stages,
        "box_stages": tiling.box_stages,
        "span": 2 if problem.kernel[2] == 2 else 4,
        "rest_pixels": tiling.rest_pixels,
        "paired": int(paired(problem)),
        "short_rows": short_rows(problem),
        "batch": problem.batch,
        "in_channels": problem.in_channels,
        **{f"in_{name}": size for name, size in zip("dhw", problem.in_size, strict=True)},
        "out_channels": problem.out_channels,
        **{f"step_{name}": size for name, size in zip("zyx", problem.kernel, strict=True)},
    }


def record(tiling: Tiling) -> tuple[int, ...]:
    """The plan as integers."""
    return tuple(fields(tiling).values())
