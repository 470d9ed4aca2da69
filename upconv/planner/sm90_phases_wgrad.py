"""The Hopper kernel for the weight's gradient of both phases of a row: what sm90_phases.py is for
the other directions, layers with stride 2, padding 1 and 3 or 4 taps in a row.

The kernel (csrc/cuda/sm90_wgrad_phases.cuh) reduces over pixels, in parts of 128 bytes of x: some
of a row, or whole rows. A job is a row of taps of 64 channels of grad_output and `n` channels of x;
`workers` thread blocks share its pixels, and a second kernel adds up what they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from .candidate import Candidate, Refusal
from .problem import Hardware, Problem
from .sm90_cost import CLOCK_MHZ
from .sm90_phases import PIECE_BYTES
from .sm90_phases import refusal as phases_refusal
from .sm90_tiling import OPERANDS
from .sm90_wgrad import flat

KERNEL = "sm90_phases_wgrad"

TILES = (128, 64)
"""Channels of x in a tile: with ROWS, UPCONV_PHASES_WGRAD_TILES in
csrc/cuda/sm90_wgrad_phases.cu."""
ROWS = (1, 2, 4, 8)
"""Of x, that a part may have."""
GRAD_ROWS = 64
PART_BYTES = 128
"""Of one channel of x in a part; of grad_output there are twice as many."""
STEPS, TAPS = 4, 4
"""Products of a part, for each tap; of 3 in a row, the fourth is computed in vain."""
COPY_WAVES = 5.2
"""Accesses to shared memory that a channel of grad_output takes in a part, where 2 would do."""
CONSUMERS = 2
HEADER_BYTES = 1024
MOST_STAGES = 8
MOST_ROUNDS = 2
"""Units of one thread block where there are workers; without, there may be more."""

LAUNCH = 10.5
"""Microseconds, of both kernels; this and what follows as benchmarks/measure_pixels.py fits it."""
UNIT_CYCLES = 750.0
STAGE_FACTOR = 1.01
READ_BYTES = 3.2e6
"""That the memory gives in a microsecond."""
SUM_BYTES = 2.4e6
"""Of the workspace, written and read in a microsecond."""


@dataclass(frozen=True)
class Tiling:
    """How a problem of three dimensions is shared out."""

    problem: Problem
    n: int
    workers: int
    stages: int = 0

    @property
    def rows(self) -> int:
        """Of x in a part: as many as fill it, or one that may need several."""
        width = self.problem.in_size[-1] * self.problem.element_bytes
        return PART_BYTES // width if PART_BYTES % width == 0 else 1

    @property
    def parts(self) -> int:
        depth, height, width = self.problem.in_size
        wide = -(-width * self.problem.element_bytes // PART_BYTES)
        return self.problem.batch * depth * -(-height // self.rows) * wide

    @property
    def jobs(self) -> int:
        problem = self.problem
        blocks = -(-problem.out_channels // GRAD_ROWS) * -(-problem.in_channels // self.n)
        return blocks * prod(problem.kernel[:-1])

    @property
    def units(self) -> int:
        return self.jobs * self.workers

    @property
    def stage_bytes(self) -> int:
        """Of x, and of grad_output with what lies beside its rows."""
        pieces = (2 * PART_BYTES // PIECE_BYTES + self.rows) | 1
        return self.n * PART_BYTES + (GRAD_ROWS * pieces + 1) * PIECE_BYTES

    @property
    def sums(self) -> bool:
        return adds_bias(self.problem)

    @property
    def workspace(self) -> int:
        """Bytes: the sums of every unit, and its part of the bias's."""
        each = CONSUMERS * self.n * GRAD_ROWS * 2 * 4
        return self.units * (each + (128 * 2 * 8 if self.sums else 0))

    @property
    def stage_cycles(self) -> float:
        """Of a part: of the tensor cores, or of the port of shared memory, for both consumers."""
        products = STEPS * TAPS * self.n / 2
        loads = STEPS * GRAD_ROWS
        copies = self.n + COPY_WAVES * GRAD_ROWS
        return max(products, products / 2 + loads + copies)

    def microseconds(self, hardware: Hardware) -> float:
        problem = self.problem
        outer = problem.out_channels * prod(problem.out_size)
        inner = problem.in_channels * prod(problem.in_size)
        read = problem.batch * problem.element_bytes * (outer + inner)
        rounds = -(-self.units // hardware.multiprocessors)
        each = -(-self.parts // self.workers) * self.stage_cycles * STAGE_FACTOR + UNIT_CYCLES
        busy = max(rounds * each / CLOCK_MHZ, read / READ_BYTES)
        return LAUNCH + busy + self.workspace / SUM_BYTES


def adds_bias(problem: Problem) -> bool:
    """Is the bias's gradient wanted, and do some rows of taps meet each number of grad_output
    once?"""
    dimensions = zip(
        *(problem.in_size[:-1], problem.out_size[:-1], problem.kernel[:-1]),
        *(problem.stride[:-1], problem.padding[:-1]),
        strict=True,
    )
    return problem.bias and all(
        out <= size * stride and pad + stride <= kernel
        for size, out, kernel, stride, pad in dimensions
    )


def refusal(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = phases_refusal(problem, hardware)
    if reason:
        return reason
    width = problem.out_size[-1]
    if width * problem.element_bytes % PIECE_BYTES:
        return f"needs rows of grad_output of a multiple of 16 bytes, not {width} numbers"
    return None


def tilings(problem: Problem, hardware: Hardware) -> Iterator[Tiling]:
    """Every tiling of a problem of three dimensions: as many workers as fill the GPU, or less."""
    for n in TILES:
        alone = Tiling(problem, n, 1)
        most = min(alone.parts, max(1, MOST_ROUNDS * hardware.multiprocessors // alone.jobs))
        room = hardware.shared_memory - HEADER_BYTES
        for workers in {1, max(1, most // 2), most}:
            yield Tiling(problem, n, workers, min(MOST_STAGES, room // alone.stage_bytes))


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = refusal(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    best = min(tilings(flat(problem), hardware), key=lambda tiling: tiling.microseconds(hardware))
    notes = (
        f"{best.jobs} jobs of a row of taps and {GRAD_ROWS} x {best.n} channels;"
        f" {best.workers} thread blocks share the pixels of each",
        f"workspace {best.workspace / 2**20:.1f} MiB of partial sums, added in a fixed order",
        *(("adds up the bias's gradient on the way",) if best.sums else ()),
    )
    return Candidate(KERNEL, best.microseconds(hardware), record(best), notes, best.sums)


def fields(tiling: Tiling) -> dict[str, int]:
    """The scalars, in the order of csrc/cuda/sm90_wgrad_phases_params.h."""
    problem = tiling.problem
    return {
        "operand": OPERANDS[problem.dtype],
        "tile_n": tiling.n,
        "workers": tiling.workers,
        "stages": tiling.stages,
        "rows": tiling.rows,
        "sums": int(tiling.sums),
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
