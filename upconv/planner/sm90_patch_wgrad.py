"""The Hopper kernel for the weight's gradient of patches: layers whose kernel is their stride.

The kernel (csrc/cuda/sm90_wgrad_patch.cuh) reduces over pixels, in parts of rows: 64 bytes of x and
the 128 bytes of grad_output that their patches have in one of their rows. A job is two such rows of
64 channels of grad_output and `n` channels of x; `workers` thread blocks share its pixels, and a
second kernel adds up what they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from .candidate import Candidate, Refusal
from .operands import OPERANDS
from .problem import Hardware, Problem
from .sm90 import rounding_legality
from .sm90_cost import CLOCK_MHZ
from .sm90_patch import BOX_BYTES, CONSUMERS
from .sm90_patch import refusal as patch_refusal

KERNEL = "sm90_patch_wgrad"

TILES = (128, 64)
"""Channels of x in a tile: UPCONV_PATCH_WGRAD_TILES in csrc/cuda/sm90_wgrad_patch.cu."""
GRAD_ROWS = 64
PART_BYTES = 64
"""Of a row of x in one part."""
STAGES = 8
"""Parts on their way, of x and of grad_output."""
MOST_ROUNDS = 2
"""Units of one thread block where there are workers; without, there may be more."""

LAUNCH = 9.95
"""Microseconds, of both kernels."""
UNIT_CYCLES = 402.0
STAGE_FACTOR = 1.19
LINE_CYCLES = 1.75
"""That TMA takes for each line of 128 bytes it touches."""
READ_BYTES = 3.76e6
"""That the memory gives in a microsecond."""
SUM_BYTES = 2.41e6
"""Of the workspace, written and read in a microsecond."""


@dataclass(frozen=True)
class Tiling:
    """How a problem of three dimensions is shared out."""

    problem: Problem
    n: int
    workers: int

    @property
    def parts(self) -> int:
        *rows, width = self.problem.in_size
        each = -(-(width + lead(self.problem)) // part_pixels(self.problem))
        return self.problem.batch * prod(rows) * each

    @property
    def pairs(self) -> int:
        """Of 64 channels of grad_output in one row of the patch: two are a job."""
        rows = -(-self.problem.out_channels // GRAD_ROWS) * prod(self.problem.kernel[:-1])
        return -(-rows // CONSUMERS)

    @property
    def jobs(self) -> int:
        return self.pairs * -(-self.problem.in_channels // self.n)

    @property
    def units(self) -> int:
        return self.jobs * self.workers

    @property
    def workspace(self) -> int:
        """Bytes: the sums of every unit, and its part of the bias's."""
        each = CONSUMERS * self.n * GRAD_ROWS * 2 * 4
        bias = CONSUMERS * 128 * 2 * 8
        return self.units * (each + (bias if self.problem.bias else 0))

    @property
    def stage_cycles(self) -> float:
        """Of a part: of the tensor cores, or of the port of shared memory, for both consumers."""
        products = CONSUMERS * 4
        loads = CONSUMERS * BOX_BYTES / 128
        boxes = loads + self.n * PART_BYTES / 128
        return max(products * self.n / 2, loads + products * self.n / 4 + boxes, self.line_cycles)

    @property
    def line_cycles(self) -> float:
        """Of TMA, where rows begin on no 128 bytes and touch two lines of memory."""
        row = 2 * self.problem.in_size[-1] * self.problem.element_bytes
        lines = 2 - gcd(row, 128) / 128
        return LINE_CYCLES * lines * (CONSUMERS * GRAD_ROWS + self.n) if lines > 1 else 0.0

    def microseconds(self, hardware: Hardware) -> float:
        problem = self.problem
        outer = problem.out_channels * prod(problem.out_size)
        inner = problem.in_channels * prod(problem.in_size)
        read = problem.batch * problem.element_bytes * (outer + inner)
        rounds = -(-self.units // hardware.multiprocessors)
        each = -(-self.parts // self.workers) * self.stage_cycles * STAGE_FACTOR + UNIT_CYCLES
        products = max(rounds * each / CLOCK_MHZ, read / READ_BYTES)
        return LAUNCH + products + self.workspace / SUM_BYTES


def part_pixels(problem: Problem) -> int:
    return PART_BYTES // problem.element_bytes


def lead(problem: Problem) -> int:
    """Pixels that a part may begin before its row of x, where not all rows begin on 16 bytes."""
    return problem.in_size[-1] % (16 // problem.element_bytes)


def refusal(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = rounding_legality(problem, hardware) or patch_refusal(problem, hardware)
    if reason:
        return reason
    if prod(problem.in_size) * problem.element_bytes % 16:
        return "needs images of a multiple of 16 bytes"
    return None


def tilings(problem: Problem, hardware: Hardware) -> Iterator[Tiling]:
    """Every tiling of a problem of three dimensions: as many workers as fill the GPU, or less."""
    for n in TILES:
        alone = Tiling(problem, n, 1)
        for workers in shares(alone.parts, alone.jobs, hardware):
            yield Tiling(problem, n, workers)


def shares(parts: int, jobs: int, hardware: Hardware) -> set[int]:
    """How many thread blocks may share the parts of a job: one, or as many as fill the GPU once or
    twice."""
    most = min(parts, max(1, MOST_ROUNDS * hardware.multiprocessors // jobs))
    return {1, max(1, most // 2), most}


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = refusal(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    found = tilings(problem.in_three(), hardware)
    best = min(found, key=lambda tiling: tiling.microseconds(hardware))
    notes = (
        f"{best.jobs} jobs of two times {GRAD_ROWS} x {best.n} channels and 2 taps;"
        f" {best.workers} thread blocks share the pixels of each",
        f"workspace {best.workspace / 2**20:.1f} MiB of partial sums, added in a fixed order",
        *(("adds up the bias's gradient on the way",) if problem.bias else ()),
    )
    return Candidate(KERNEL, best.microseconds(hardware), record(best), notes, problem.bias)


def fields(tiling: Tiling) -> dict[str, int]:
    """The scalars, in the order of csrc/cuda/sm90_wgrad_patch_params.h."""
    problem = tiling.problem
    return {
        "operand": OPERANDS[problem.dtype],
        "tile_n": tiling.n,
        "workers": tiling.workers,
        "input_stages": STAGES,
        "box_stages": STAGES,
        "sums": int(problem.bias),
        "batch": problem.batch,
        "in_channels": problem.in_channels,
        **{f"in_{name}": size for name, size in zip("dhw", problem.in_size, strict=True)},
        "out_channels": problem.out_channels,
        "step_z": problem.kernel[0],
        "step_y": problem.kernel[1],
    }


def record(tiling: Tiling) -> tuple[int, ...]:
    """The plan as integers."""
    return tuple(fields(tiling).values())
