"""The CUDA-core kernel's side of the planner: when it may serve, how it is tiled, what it is told.

The kernel (csrc/cuda/direct_fprop.cuh) adds up, at every point q, all phases of some output
channels in the registers of one thread. This module picks how many outputs and which points a
thread gets, by the least expected time, and writes it as the integers that
csrc/cuda/direct_params.h reads.
"""

from __future__ import annotations

from math import prod

from .candidate import Candidate, Refusal
from .direct_shape import NOWHERE, Convolution, Kind, Rows, convolutions, row_choices
from .direct_tiling import CLOCK_MHZ, Tiling, least_cycles, tiles_of, tilings
from .legality import first_refusal
from .problem import ELEMENT_BYTES, Hardware, Problem

KERNEL = "direct_fprop"

TYPES = ("float32", "float64", "bfloat16", "float16")
"""In the order of the numbers that the kernel knows them by."""
FEW = 8
"""Channels a group from which the input's gradient is left to others without a closer look."""
MAX_KINDS = 128
MAX_FIRSTS = 256
MAX_OFFSETS = 512
MAX_TAPS = 4608


def legality(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = first_refusal(problem, hardware, ELEMENT_BYTES)
    if reason:
        return reason
    if prod(problem.kernel) >= 1 << 15:
        return f"{prod(problem.kernel)} taps: weight positions are 16-bit numbers"
    largest = max(*problem.in_size, *problem.out_size)
    planes = max(prod(problem.in_size), prod(problem.out_size))
    if largest >= NOWHERE or planes >= 1 << 31:
        return "one channel of one image has 2^31 elements or more"
    least = min(problem.in_channels, problem.out_channels) // problem.groups
    if problem.direction == "grad_input" and least >= FEW and problem.dtype != "float64":
        return f"{least} channels a group: gradients of {FEW} and more are for the tensor cores"
    if problem.weight_elements >= 1 << 31:
        return "the weight has 2^31 elements or more"
    return None


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = legality(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    if problem.direction == "grad_input":
        ways = [Convolution.of_input_gradient(problem)]
    else:
        ways = convolutions(problem)
    best = best_tiling(ways, hardware)
    if best is None:
        return Refusal(KERNEL, "no tile fits: too many taps or phases, or too wide a margin")
    return Candidate(KERNEL, best.microseconds, record(best), best.notes)


def best_tiling(ways: list[Convolution], hardware: Hardware) -> Tiling | None:
    """The fastest tiling of the fastest way to write the convolution."""
    best: Tiling | None = None
    choices = [rows for way in ways for rows in row_choices(way, list(tiles_of(way)))]
    for rows in sorted(filter(fits_tables, choices), key=least_cycles):
        # Rows whose products alone take longer than all of the best so far need no closer look.
        least = least_cycles(rows) / hardware.multiprocessors / CLOCK_MHZ
        if best is not None and least > best.microseconds:
            break
        for tiling in tilings(rows, hardware):
            if best is None or tiling.microseconds < best.microseconds:
                best = tiling
    return best


def fits_tables(rows: Rows) -> bool:
    """Do the tables of the kernel's parameters hold all kinds? Counted before they are made."""
    z, y, x = rows.convolution.axes
    groups = -(-z.phases * y.phases // rows.folds) * -(-x.phases // rows.width)
    if groups > MAX_KINDS or groups * rows.folds > MAX_FIRSTS:
        return False
    if prod(max(map(len, axis.taps)) for axis in (z, y, x)) > MAX_OFFSETS:
        return False
    return len(offset_lists(rows.kinds)[1]) <= MAX_OFFSETS and taps_of(rows.kinds) <= MAX_TAPS


def taps_of(kinds: tuple[Kind, ...]) -> int:
    return sum(len(kind.taps) for kind in kinds)


def offset_lists(
    kinds: tuple[Kind, ...],
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Where each kind's shifts begin, and all of them; kinds with the same list share it."""
    places: dict[tuple[tuple[int, int, int], ...], int] = {}
    begins: list[int] = []
    shifts: list[tuple[int, int, int]] = []
    for kind in kinds:
        if kind.shifts not in places:
            places[kind.shifts] = len(shifts)
            shifts += kind.shifts
        begins.append(places[kind.shifts])
    return begins, shifts


def scalar_fields(tiling: Tiling) -> dict[str, int]:
    """The scalars of csrc/cuda/direct_params.h by name, in its order."""
    convolution, shape = tiling.convolution, tiling.rows
    axes = dict(zip("zyx", convolution.axes, strict=True))
    fields = {
        "type": TYPES.index(convolution.dtype),
        "rows": shape.rows,
        "warps": tiling.warps,
        "row_warps": tiling.row_warps,
        "width": shape.width,
        "folds": shape.folds,
        "batch": convolution.batch,
        "groups": convolution.groups,
        "in_channels": convolution.in_channels,
        "out_channels": convolution.out_channels,
    }
    fields |= {f"in_{n}": a.in_size for n, a in zip("dhw", axes.values(), strict=True)}
    fields |= {f"out_{n}": a.out_size for n, a in zip("dhw", axes.values(), strict=True)}
    fields |= {f"in_step_{n}": a.in_step for n, a in axes.items()}
    fields |= {f"out_step_{n}": a.out_step for n, a in axes.items()}
    fields |= {f"shift_{n}": a.low * a.in_step for n, a in axes.items()}
    fields |= {f"tiles_{n}": count for n, count in zip("zyx", tiling.tiles, strict=True)}
    fields |= {f"tile_{n}": size for n, size in zip("zyx", tiling.tile, strict=True)}
    fields |= dict(zip(("slabs", "tile_rows", "pitch"), tiling.extent, strict=True))
    return fields | {
        "plane": tiling.plane,
        "channel": tiling.channel,
        "chunk": tiling.chunk,
        "set_aside": convolution.set_aside - 1,
        "weight_in": convolution.weight_in,
        "weight_out": convolution.weight_out,
        "weight_group": convolution.weight_group,
        "most_taps": tiling.most_taps,
        "vector": tiling.vector,
        "straight": int(tiling.straight > 0),
        "row_lanes": tiling.row_lanes,
        "channel_blocks": shape.channel_blocks,
        "row_blocks": tiling.row_blocks,
        "blocks": tiling.blocks,
        "repeats": tiling.repeats,
        "shared_bytes": tiling.shared_bytes,
    }


def record(tiling: Tiling) -> tuple[int, ...]:
    """The plan as integers, in the order of csrc/cuda/direct_params.h."""
    kinds = tiling.rows.kinds
    begins, shifts = offset_lists(kinds)
    kind_fields: list[int] = []
    firsts: list[int] = []
    taps: list[int] = []
    for kind, begin in zip(kinds, begins, strict=True):
        end = begin + len(kind.shifts)
        kind_fields += [kind.first_x, kind.columns, len(firsts) // 2, begin, end, len(taps)]
        firsts += [value for first in kind.firsts for value in first]
        taps += kind.taps
    fields = scalar_fields(tiling)
    counts = (len(kinds), len(firsts) // 2, len(shifts), len(taps))
    fields |= dict(zip(("kinds", "firsts", "offsets", "taps"), counts, strict=True))
    offsets = [tiling.offset(shift) for shift in shifts]
    return (*fields.values(), *kind_fields, *firsts, *offsets, *taps)
