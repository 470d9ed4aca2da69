"""The CPU kernel's side of the planner: when it may serve, what it costs, what it is told.

Two estimates decide between this kernel and PyTorch's own: `Cost` and `aten_microseconds`.
Both are sums of few terms (arithmetic, memory, fixed cost) with constants measured on one server
core with AVX-512 at 2.8 GHz (CYCLES_PER_MICROSECOND); another clock moves both alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

from . import cpu_aten
from .candidate import Candidate, Refusal
from .cpu_aten import CYCLES_PER_MICROSECOND, RECYCLED_BYTES
from .geometry import Phase, halo, phases
from .problem import Hardware, Problem, three

KERNEL = "cpu_fprop"

PARAMS_HEAD = (
    "isa",
    "batch",
    "cin",
    "cout",
    "groups",
    "tile",
    "chunk",
    "threads",
    *(f"in_size[{i}]" for i in range(3)),
    *(f"out_size[{i}]" for i in range(3)),
    *(f"kernel[{i}]" for i in range(3)),
    *(f"stride[{i}]" for i in range(3)),
    *(f"pitch[{i}]" for i in range(3)),
)
"""The first parameters, as `enum Param` in csrc/cpu/fprop.h names them. Per dimension follow: the
number of phases, then per phase its first output, its number of outputs, its number of taps, and
(tap, shift) for every tap."""

ISA = {"": 0, "scalar": 0, "avx2": 1, "avx512": 2}
VECTOR_BYTES = (16, 32, 64)
MAX_ROWS = (4, 4, 8)
"""Output channels of the widest micro-kernel, by instruction set."""

STRIP_BYTES = 384
"""Positions are computed in strips of this many bytes a channel: 6 vectors of AVX-512."""
BUFFER_BYTES = 384 * 1024
"""Bound on the input buffer of a tile. L2 is 512 KB to 2 MB on CPUs with AVX2 or later; from 128 to
512 KB the speed did not change by more than 5 %."""
MAX_TILE_BYTES = 8 * 1024
UNITS_PER_THREAD = 4
"""Work is cut finely enough that no thread waits for long at the end."""

FLOPS_PER_THREAD, OUTPUTS_PER_THREAD = 2e6, 2e4
"""About 20 microseconds of work: less is not worth waking a thread for."""

Triple = tuple[int, int, int]
Phases = tuple[tuple[Phase, ...], tuple[Phase, ...], tuple[Phase, ...]]


@dataclass(frozen=True)
class Layout:
    """The flat space of csrc/cpu/fprop_job.h for one problem, and how it is cut into work."""

    in_size: Triple
    phases: Phases
    pitch: Triple
    tile: int
    chunk: int
    buffer: int
    """Elements of one channel of the input buffer."""
    threads: int
    """The most threads that are worth waking."""

    @property
    def image(self) -> int:
        """Flat positions of one image."""
        return prod(self.pitch)


def _pitch(size: int, dimension: tuple[Phase, ...]) -> int:
    """The least distance of two rows at which no tap of one row reads the data of the other."""
    low, high = halo(dimension)
    count = max(phase.count for phase in dimension)
    return max(size - low, count + high, count, size)


def _buffer(layout_phases: Phases, pitch: Triple, tile: int, line: int) -> int:
    """Elements a tile reads of one channel: rows that overlap share them (`lay_out_input`)."""
    depth, height, width = layout_phases
    low, high = halo(width)
    before = (line - 1 - min(low, 0)) // line * line
    rows = sorted(
        {
            (a.shift * pitch[1] + b.shift) * pitch[2]
            for a, b in product(*([t for p in dim for t in p.taps] for dim in (depth, height)))
        }
    )
    total, end = 0, None
    for row in rows:
        begin, row_end = row - before, row + tile + max(high, 0)
        total += row_end - (begin if end is None or begin > end else end)
        end = row_end
    return total


def _lay_out(problem: Problem, threads: int) -> Layout:
    in_size = three(problem.in_size, 1)
    dims = [
        phases(*dimension)
        for dimension in zip(
            in_size,
            three(problem.kernel, 1),
            three(problem.stride, 1),
            three(problem.padding, 0),
            three(problem.output_padding, 0),
            three(problem.dilation, 1),
            strict=True,
        )
    ]
    all_phases = (dims[0], dims[1], dims[2])
    depth, height, width = (_pitch(n, d) for n, d in zip(in_size, dims, strict=True))
    pitch = (depth, height, width)
    cin = problem.in_channels // problem.groups
    chunk = cout = problem.out_channels // problem.groups
    element = 8 if problem.dtype == "float64" else 4
    strip, line = STRIP_BYTES // element, 64 // element
    flat = problem.batch * prod(pitch)

    tile = strip
    while tile < min(flat, MAX_TILE_BYTES // element):
        wider = tile + strip
        if cin * element * _buffer(all_phases, pitch, wider, line) > BUFFER_BYTES:
            break
        tile = wider

    def units() -> int:
        return ceil(flat / tile) * problem.groups * ceil(cout / chunk)

    while units() < UNITS_PER_THREAD * threads and tile > 2 * strip:
        tile = ceil(tile / 2 / strip) * strip
    while units() < UNITS_PER_THREAD * threads and chunk > 8:
        chunk = ceil(chunk / 2 / 8) * 8
    outputs = problem.batch * problem.out_channels * prod(problem.out_size)
    work = problem.flops / FLOPS_PER_THREAD + outputs / OUTPUTS_PER_THREAD
    return Layout(
        in_size=in_size,
        phases=all_phases,
        pitch=pitch,
        tile=tile,
        chunk=chunk,
        buffer=_buffer(all_phases, pitch, tile, line),
        threads=min(units(), 1 + int(work)),
    )


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    """Legal for every contiguous problem; `microseconds` is what it should cost."""
    if hardware.kind != "cpu":
        return Refusal(KERNEL, "runs on CPUs only")
    if problem.channels_last:
        return Refusal(KERNEL, "reads and writes NCHW; this problem is channels_last")
    layout = _lay_out(problem, hardware.threads)
    cost = Cost.of(problem, hardware, layout)
    params = (
        ISA.get(hardware.isa, 0),
        problem.batch,
        problem.in_channels,
        problem.out_channels,
        problem.groups,
        layout.tile,
        layout.chunk,
        layout.threads,
        *layout.in_size,
        *three(problem.out_size, 1),
        *three(problem.kernel, 1),
        *three(problem.stride, 1),
        *layout.pitch,
        *_phase_lists(layout.phases),
    )
    return Candidate(KERNEL, cost.microseconds, params, cost.notes(problem, layout))


def aten_microseconds(problem: Problem, hardware: Hardware) -> float:
    """What PyTorch's own operator should take."""
    return cpu_aten.microseconds(problem, hardware)


def aten_note(problem: Problem) -> str:
    return cpu_aten.describe(problem)


def _phase_lists(all_phases: Phases) -> Iterator[int]:
    for dimension in all_phases:
        yield len(dimension)
        for phase in dimension:
            yield from (phase.first, phase.count, len(phase.taps))
            for tap in phase.taps:
                yield from (tap.k, tap.shift)


# Cycles of one step (one tap, one input channel, one vector of positions), by the rows of the
# micro-kernel. AVX-512 and AVX2 issue two multiply-adds a cycle; few rows are bound by the loads.
STEP_CYCLES = (
    {4: 4.5, 2: 2.5, 1: 1.5},
    {4: 2.6, 2: 1.7, 1: 1.4},
    {8: 5.3, 4: 3.0, 2: 2.2, 1: 1.9},
)
CALL_CYCLES = 60.0
"""Start and end of a micro-kernel call: sums to and from registers, loops over taps."""
PIECE_CYCLES = {"copied": 12.0, "woven": 30.0}
"""A run of outputs within one row: address, and the partial vector at its end."""
PIECE_BLOCK_CYCLES = 40.0
"""The same, once for a block of channels."""
LIST_CYCLES = 150.0
"""Finding a row of the output and of the input, once for a unit of work."""
FILL_CYCLES = 0.35
"""Copying one element into the input buffer."""
COPY_CYCLES = 12.0
"""One run of the input buffer: a row, or a gap."""
PACK_CYCLES = 4.0
"""One weight into the order of the micro-kernel."""
STORE_BYTES_PER_MICROSECOND = {"recycled": 12000.0, "fresh": 3500.0}
"""One thread storing outputs: to memory that malloc had before, and to newly mapped pages."""
CALL_MICROSECONDS = 6.0
TEAM_MICROSECONDS = 5.0
"""Waking the other threads, twice a call."""


def _blocks(channels: int, max_rows: int) -> Iterator[int]:
    """Rows of the micro-kernels that share `channels` (`lay_out_channels`)."""
    while channels > 0:
        rows = max_rows
        while rows > 1 and channels < rows - (1 if rows > 2 else 0):
            rows //= 2
        yield rows
        channels -= rows


@dataclass(frozen=True)
class Cost:
    """What the kernel should take, term by term, in microseconds."""

    compute: float
    store: float
    fill: float
    pack: float
    memory: float
    fixed: float
    threads: int

    @property
    def microseconds(self) -> float:
        return self.compute + self.store + self.fill + self.pack + self.memory + self.fixed

    @staticmethod
    def of(problem: Problem, hardware: Hardware, layout: Layout) -> Cost:
        isa = ISA.get(hardware.isa, 0)
        element = 8 if problem.dtype == "float64" else 4
        cin = problem.in_channels // problem.groups
        cout = problem.out_channels // problem.groups
        flat = problem.batch * layout.image
        vectors = problem.groups * flat * element / VECTOR_BYTES[isa]
        threads = max(1, min(hardware.threads, layout.threads))
        cycle = 1 / CYCLES_PER_MICROSECOND / threads

        blocks = [
            rows
            for first in range(0, cout, layout.chunk)
            for rows in _blocks(min(layout.chunk, cout - first), MAX_ROWS[isa])
        ]
        taps = prod(sum(len(phase.taps) for phase in dim) for dim in layout.phases)
        phase_count = prod(len(dim) for dim in layout.phases)
        steps = sum(STEP_CYCLES[isa][rows] for rows in blocks) * taps * cin * vectors
        calls = len(blocks) * phase_count * vectors / 4
        # Rows are cut at the ends of strips as well.
        row_phases = phase_count / len(layout.phases[2])
        pieces = flat / layout.pitch[2] + flat * element / STRIP_BYTES
        stride = three(problem.stride, 1)[2]
        weave = 3.0 if stride == 1 else 2.0 + 1.5 * stride
        piece = PIECE_CYCLES["copied" if stride == 1 else "woven"]
        stored = cout * phase_count * vectors * weave
        stored += problem.out_channels * row_phases * pieces * piece
        stored += problem.groups * len(blocks) * row_phases * pieces * PIECE_BLOCK_CYCLES
        stored += problem.groups * ceil(cout / layout.chunk) * pieces * LIST_CYCLES
        units = ceil(flat / layout.tile) * problem.groups * ceil(cout / layout.chunk)
        runs = layout.buffer / layout.pitch[2]
        out_bytes = problem.batch * problem.out_channels * prod(problem.out_size)
        out_bytes *= problem.element_bytes
        speed = STORE_BYTES_PER_MICROSECOND["fresh" if out_bytes > RECYCLED_BYTES else "recycled"]
        return Cost(
            compute=(steps + calls * CALL_CYCLES) * cycle,
            store=stored * cycle,
            fill=units * cin * (layout.buffer * FILL_CYCLES + runs * COPY_CYCLES) * cycle,
            pack=problem.in_channels * cout * prod(problem.kernel) * PACK_CYCLES * cycle,
            memory=out_bytes / speed / threads,
            fixed=CALL_MICROSECONDS + (TEAM_MICROSECONDS if threads > 1 else 0.0),
            threads=threads,
        )

    def notes(self, problem: Problem, layout: Layout) -> tuple[str, ...]:
        useful = prod(problem.out_size) / prod(len(d) for d in layout.phases) / layout.image
        terms = ("compute", "store", "fill", "pack", "memory", "fixed")
        parts = ", ".join(f"{term} {getattr(self, term):.0f}" for term in terms)
        return (
            f"tiles of {layout.tile} positions, {layout.chunk} output channels a unit of work,"
            f" {self.threads} thread(s)",
            f"{100 * min(useful, 1.0):.0f} % of the computed positions are outputs",
            f"expected microseconds: {parts}",
        )
