"""The Hopper kernel for the weight's gradient of all phases of a row.

Generators of GANs, decoders and pose heads have a stride of 2, padding 1 and 3 or 4 taps in a row
(sm90_phases.py is for their other directions); vocoders and decoders of vision transformers a
stride of 4 or 8, and a kernel and padding that are multiples of 4; mask heads a kernel and stride
of 2 x 2, and rows so short that a part has whole ones (others are sm90_patch_wgrad.py's).

The kernel (csrc/cuda/sm90_wgrad_phases.cuh) reduces over pixels, in parts of 128 bytes of x: some
of a row, or whole rows. Four taps side by side, or 2 x 2, are a quad. A job is 64 pairs of a
channel of grad_output and a quad, of a row of taps, and `n` channels of x; `workers` thread blocks
share its pixels, and a second kernel adds up what they have.

Of patches of 2 x 2 in short rows a part has a run of whole rows. TMA brings x where runs begin on
16 bytes; otherwise, in 16-bit types, loaders copy it, and a part is filled up with several runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from .candidate import Candidate, Refusal
from .operands import OPERANDS
from .problem import Hardware, Problem
from .sm90_cost import CLOCK_MHZ
from .sm90_patch_wgrad import GRAD_ROWS, shares
from .sm90_phases import PIECE_BYTES, common_refusal

KERNEL = "sm90_phases_wgrad"

TWO = tuple(product((128, 64), (1, 2, 4, 8)))
"""For stride 2: channels of x in a tile, and rows of x that a part may have."""
WIDE = ((128, 4, 1), (128, 4, 2), (128, 8, 2))
"""For others: channels of x, stride, quads of a job."""
SQUARE = ((128,), (64,))
"""For 2 x 2: channels of x, in 16-bit types both with TMA and with copies. All as
UPCONV_PHASES_WGRAD_TWO and the like in csrc/cuda/sm90_wgrad_phases.cu."""
PART_BYTES = 128
"""Of one channel of x in a part."""
STEPS, TAPS = 4, 4
"""Products of a part, for each tap; of 3 in a row, the fourth is computed in vain."""
COPY_WAVES = 5.2
"""Accesses to shared memory that a channel of grad_output takes in a part, stride 2, where 2 would
do."""
PATCH_BYTES = TAPS * PART_BYTES + PIECE_BYTES
"""Of one channel of grad_output in a part, 2 x 2: the most that all runs may take."""
RUN_PIXELS = 32
"""That one box of TMA is for, other strides."""
CONSUMERS = 2
HEADER_BYTES = 1024
MOST_STAGES = 8

LAUNCH = 9.24
"""Microseconds, of both kernels; this and what follows as benchmarks/measure_pixels.py fits it."""
UNIT_CYCLES = 758.0
STAGE_FACTOR = 0.886
WIDE_FACTOR = 1.113
"""For strides other than 2."""
RUN_BYTES = 30.8
"""Of grad_output that TMA brings in a cycle, 2 x 2."""
WHOLE_CYCLES = 1.2
"""That TMA takes for a row of x of 128 bytes."""
RAGGED_CYCLES = 5.89
"""That it takes for one that begins anywhere and is filled up with zeros."""
EMPTY_CYCLES = 1000.0
"""That TMA takes to make a box of zeros of what is beyond a row."""
HIDDEN = 0.279
"""Of the shorter of reading and multiplying, what the longer does not hide."""
READ_BYTES = 3.93e6
"""That the memory gives in a microsecond."""
SUM_BYTES = 2.54e6
"""Of the workspace, written and read in a microsecond."""


@dataclass(frozen=True)
class Tiling:
    """How a problem of three dimensions is shared out."""

    problem: Problem
    n: int
    workers: int
    stages: int = 0

    @property
    def stride(self) -> int:
        return self.problem.stride[-1]

    @property
    def quads(self) -> int:
        return job_quads(self.problem)

    @property
    def square(self) -> bool:
        return square_rows(self.problem) > 0

    @property
    def runs(self) -> int:
        """Of whole rows in a part, where loaders copy x; or zero."""
        return square_run(self.problem).copied

    @property
    def rows(self) -> int:
        """Of x in a part, or in a run: as many as fill it, or one that may need several."""
        if self.square:
            return square_rows(self.problem)
        pixels = self.problem.in_size[-1]
        width = pixels * self.problem.element_bytes
        if PART_BYTES % width or (self.stride != 2 and pixels != RUN_PIXELS):
            return 1
        return PART_BYTES // width

    @property
    def boxed(self) -> bool:
        """Does TMA bring grad_output, stride 2? Otherwise loaders do."""
        return self.stride == 2 and self.rows == 1 and not self.square

    @property
    def parts(self) -> int:
        depth, height, width = self.problem.in_size
        wide = -(-width * self.problem.element_bytes // PART_BYTES)
        rows = self.problem.batch * depth * -(-height // self.rows) * wide
        return -(-rows // max(1, self.runs))

    @property
    def jobs(self) -> int:
        problem = self.problem
        blocks = -(-problem.out_channels * self.quads // GRAD_ROWS)
        windows = prod(problem.kernel[:-1]) * -(-problem.kernel[-1] // (TAPS * self.quads))
        if self.square:
            windows = problem.kernel[0]
        return blocks * -(-problem.in_channels // self.n) * windows

    @property
    def units(self) -> int:
        return self.jobs * self.workers

    @property
    def stage_bytes(self) -> int:
        """Of x, and of grad_output with what lies beside its rows."""
        whole = 2 * PART_BYTES // PIECE_BYTES
        if self.square:
            return self.n * PART_BYTES + GRAD_ROWS * PATCH_BYTES
        if self.boxed:
            return self.n * PART_BYTES + GRAD_ROWS * (whole + 3) * PIECE_BYTES
        if self.stride == 2:
            pieces = GRAD_ROWS * ((whole + self.rows) | 1) + 1
            return self.n * PART_BYTES + pieces * PIECE_BYTES
        box = -(-GRAD_ROWS // self.quads * self.run_bytes // 128) * 128
        boxes = PART_BYTES // self.problem.element_bytes // RUN_PIXELS
        return self.n * PART_BYTES + boxes * box

    @property
    def run_bytes(self) -> int:
        """Of one channel in a box: as in csrc/cuda/sm90_wgrad_phases_wide.cuh."""
        size = self.problem.element_bytes
        numbers = RUN_PIXELS * self.stride + max(TAPS * self.quads - self.stride, 0)
        pieces = -(-(numbers * size + (8 if size == 2 else 0)) // PIECE_BYTES)
        return (-(-pieces // 8) * 8 + 4 if self.stride == 4 else pieces) * PIECE_BYTES

    @property
    def sums(self) -> bool:
        return adds_bias(self.problem)

    @property
    def workspace(self) -> int:
        """Bytes: the sums of every unit, and its part of the bias's, a float64 of each thread."""
        bias = CONSUMERS * 128 * 8 if self.sums else 0
        return self.units * (self.n * GRAD_ROWS * TAPS * 4 + bias)

    @property
    def stage_cycles(self) -> float:
        """Of a part: of the tensor cores, or of the port of shared memory, for both consumers."""
        products = STEPS * TAPS * self.n / 2
        loads = STEPS * GRAD_ROWS
        if self.runs:
            below = patch_bytes(self.problem, self.rows)
            boxes = self.runs * run_cycles(self.problem, self.rows)
            copies = self.n * COPY_WAVES / 2 + self.runs * GRAD_ROWS * below / 128
            return max(products, boxes, products / 2 + loads + copies)
        if self.square:
            return max(products, self.box_cycles)
        two = self.n + COPY_WAVES * GRAD_ROWS
        copies = two if self.stride == 2 else self.stage_bytes / 128
        busy = max(products, products / 2 + loads + copies)
        return busy if self.stride == 2 else busy * WIDE_FACTOR + self.empty_cycles

    @property
    def box_cycles(self) -> float:
        """Of a part: what TMA takes, 2 x 2."""
        row = self.rows * self.problem.in_size[-1] * self.problem.element_bytes
        each = WHOLE_CYCLES if row == PART_BYTES else RAGGED_CYCLES
        return GRAD_ROWS * TAPS * row / RUN_BYTES + self.n * each

    @property
    def empty_cycles(self) -> float:
        """Of a part, on average, where the last one of a row has a box that is beyond it."""
        part = PART_BYTES // self.problem.element_bytes
        width = self.problem.in_size[-1]
        empty = 0 < width % part <= part - RUN_PIXELS and self.rows == 1
        return EMPTY_CYCLES / -(-width // part) if empty else 0.0

    def microseconds(self, hardware: Hardware) -> float:
        problem = self.problem
        outer = problem.out_channels * prod(problem.out_size)
        inner = problem.in_channels * prod(problem.in_size)
        read = problem.batch * problem.element_bytes * (outer + inner)
        rounds = -(-self.units // hardware.multiprocessors)
        each = -(-self.parts // self.workers) * self.stage_cycles * STAGE_FACTOR + UNIT_CYCLES
        products, reading = rounds * each / CLOCK_MHZ, read / READ_BYTES
        busy = max(products, reading) + HIDDEN * min(products, reading)
        return LAUNCH + busy + self.workspace / SUM_BYTES


class Run(NamedTuple):
    """Rows of x that lie one behind the other, as what is below them does in grad_output."""

    rows: int
    copied: int
    """Runs of a part, which loaders copy. Zero: it has one, and TMA brings x."""


@lru_cache(maxsize=256)
def square_run(problem: Problem) -> Run:
    """What a part has where a quad is 2 x 2. No rows: the layer is no such one, or its rows are
    longer, or of odd length.

    TMA brings as many rows as divide an image's and begin on 16 bytes. Where there are none, runs
    are those whose pixels take the least time: of the products, or of grad_output's boxes.
    """
    none = Run(0, 0)
    if problem.kernel[-2:] != (2, 2) or problem.kernel != problem.stride:
        return none
    if any(problem.padding) or any(problem.output_padding):
        return none
    height, width = problem.in_size[-2:]
    if width % 2:  # a thread's two pixels of 16 bits are of one row
        return none
    part = PART_BYTES // problem.element_bytes
    rows = [n for n in range(1, part // width + 1) if height % n == 0]
    boxed = [n for n in rows if n * width * problem.element_bytes % PIECE_BYTES == 0]
    if boxed or problem.element_bytes == 4:
        return Run(max(boxed), 0) if boxed else none

    def cost(run: Run) -> tuple[float, int, int]:
        products = STEPS * TAPS * max(SQUARE)[0] / 2
        cycles = max(products, run.copied * run_cycles(problem, run.rows))
        pixels = run.copied * run.rows * width
        return round(cycles / pixels, 3), -pixels, run.copied

    runs = (
        Run(n, many)
        for n in rows
        for many in range(1, part // (n * width) + 1)
        if many * patch_bytes(problem, n) <= PATCH_BYTES
    )
    return min(runs, key=cost, default=none)


def square_rows(problem: Problem) -> int:
    """Rows of x in a run, where a quad is 2 x 2; or zero."""
    return square_run(problem).rows


def patch_bytes(problem: Problem, rows: int) -> int:
    """Of one channel of grad_output below a run: an odd number of pieces, as square_bytes in
    csrc/cuda/sm90_wgrad_phases_square.cuh."""
    pixels = rows * problem.in_size[-1]
    return (-(-TAPS * pixels * problem.element_bytes // PIECE_BYTES) | 1) * PIECE_BYTES


def run_cycles(problem: Problem, rows: int) -> float:
    """That TMA takes for what is below a run."""
    numbers = TAPS * rows * problem.in_size[-1]
    return GRAD_ROWS * max(numbers * problem.element_bytes / RUN_BYTES, RAGGED_CYCLES)


def adds_bias(problem: Problem) -> bool:
    """Is the bias's gradient wanted, and do some rows of taps meet each number of grad_output
    once? (Stride 2: what TMA brings is rounded.)"""
    if square_rows(problem):
        return problem.bias
    dimensions = zip(
        *(problem.in_size[:-1], problem.out_size[:-1], problem.kernel[:-1]),
        *(problem.stride[:-1], problem.padding[:-1]),
        strict=True,
    )
    return (
        problem.bias
        and problem.stride[-1] == 2
        and all(
            out <= size * stride and pad + stride <= kernel
            for size, out, kernel, stride, pad in dimensions
        )
    )


def job_quads(problem: Problem) -> int:
    """Of a job: two, where a row of taps has as many."""
    return 1 if problem.stride[-1] == 2 or problem.kernel[-1] == TAPS else 2


def row_fits(problem: Problem) -> bool:
    """Has the kernel a form for the taps of a row?"""
    kernel, stride, padding = problem.kernel[-1], problem.stride[-1], problem.padding[-1]
    if square_rows(problem):
        return True
    if stride == 2:
        return padding == 1 and kernel in (3, TAPS)
    quads = job_quads(problem)
    known = (stride, quads) in {form[1:] for form in WIDE}
    return known and kernel % (TAPS * quads) == 0 and padding % 4 == 0


def refusal(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    if not row_fits(problem):
        return (
            "takes stride 2, padding 1 and 3 or 4 taps in a row, or stride 4 or 8, multiples of 8"
            " taps, or 4 by 4, and a padding that is a multiple of 4, or patches of 2 x 2 with"
            " whole rows in 128 bytes"
        )
    reason = common_refusal(problem, hardware)
    if reason or square_rows(problem):
        return reason
    for name, size in (("", problem.in_size), ("of grad_output ", problem.out_size)):
        if size[-1] * problem.element_bytes % PIECE_BYTES:
            return f"needs rows {name}of a multiple of 16 bytes, not {size[-1]} numbers"
    return None


def tilings(problem: Problem, hardware: Hardware) -> Iterator[Tiling]:
    """Every tiling of a problem of three dimensions: as many workers as fill the GPU, or less."""
    forms = SQUARE if square_rows(problem) else TWO if problem.stride[-1] == 2 else WIDE
    for n in sorted({form[0] for form in forms}):
        alone = Tiling(problem, n, 1)
        room = hardware.shared_memory - HEADER_BYTES
        for workers in shares(alone.parts, alone.jobs, hardware):
            yield Tiling(problem, n, workers, min(MOST_STAGES, room // alone.stage_bytes))


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = refusal(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    found = tilings(problem.in_three(), hardware)
    best = min(found, key=lambda tiling: tiling.microseconds(hardware))
    notes = (
        f"{best.jobs} jobs of {TAPS * best.quads} taps and {GRAD_ROWS // best.quads} x {best.n}"
        " channels;"
        f" {best.workers} thread blocks share the pixels of each",
        f"workspace {best.workspace / 2**20:.1f} MiB of partial sums, added in a fixed order",
        *((f"loaders copy x: {best.runs} x {best.rows} rows in a part",) if best.runs else ()),
        *(("adds up the bias's gradient on the way",) if best.sums else ()),
    )
    return Candidate(KERNEL, best.microseconds(hardware), record(best), notes, best.sums)


def as_rows(problem: Problem) -> Problem:
    """A layer of patches of 2 x 2 as one whose rows are the runs, with 4 numbers of grad_output
    for each pixel, side by side."""
    depth, height, width = problem.in_size
    rows, step = square_rows(problem), problem.kernel[0]
    return replace(
        problem,
        in_size=(depth, height // rows, rows * width),
        kernel=(step, 1, TAPS),
        stride=(step, 1, TAPS),
    )


def fields(tiling: Tiling) -> dict[str, int]:
    """The scalars, in the order of csrc/cuda/sm90_wgrad_phases_params.h."""
    problem = as_rows(tiling.problem) if tiling.square else tiling.problem
    return {
        "operand": OPERANDS[problem.dtype],
        "tile_n": tiling.n,
        "workers": tiling.workers,
        "stages": tiling.stages,
        "rows": 1 if tiling.square else tiling.rows,
        "job_quads": tiling.quads,
        "square": tiling.problem.in_size[-1] if tiling.square else 0,
        "runs": tiling.runs,
        "sums": int(tiling.sums),
        "batch": problem.batch,
        "in_channels": problem.in_channels,
        **{f"in_{name}": size for name, size in zip("dhw", problem.in_size, strict=True)},
        "out_channels": problem.out_channels,
        **{f"out_{name}": size for name, size in zip("dhw", problem.out_size, strict=True)},
        **{f"kernel_{name}": size for name, size in zip("zyx", problem.kernel, strict=True)},
        **{f"stride_{name}": size for name, size in zip("zyx", problem.stride, strict=True)},
        **{f"pad_{name}": size for name, size in zip("zyx", problem.padding, strict=True)},
    }


def record(tiling: Tiling) -> tuple[int, ...]:
    """The plan as integers."""
    return tuple(fields(tiling).values())
