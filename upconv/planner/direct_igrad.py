"""The CUDA-core kernel for the input's gradient of depthwise layers: when it may serve, its cost.

The kernel (csrc/cuda/direct_igrad.cuh) divides its work as that for the weight's gradient does and
takes the same integers; `Division` is that of direct_wgrad.py with no input channels to add up.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import direct_wgrad
from .candidate import Candidate, Refusal
from .direct_wgrad import PIECES, STAGED_OUTPUTS, WARPS, Division
from .problem import Hardware, Problem

KERNEL = "direct_igrad"

COLUMNS = (4, 8, 16)
"""Rows of the kernel, over all output channels, of a thread. The kernel is compiled for these."""
MOST_TAPS = 32
"""Along the width: one for each lane."""


def legality(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = direct_wgrad.legality(problem, hardware)
    if reason:
        return reason
    if problem.element_bytes < 4:
        return "has no form for 16-bit types"
    if problem.in_channels != problem.groups:
        return f"{problem.in_channels // problem.groups} input channels a group: it takes 1"
    columns = Division(problem, 0, COLUMNS[-1], 1, 1, 1).all_columns
    if columns > COLUMNS[-1]:
        return f"{columns} rows of the kernel over all output channels: it takes {COLUMNS[-1]}"
    width = problem.kernel[-1]
    if width > MOST_TAPS or (width - 1) * problem.dilation[-1] >= STAGED_OUTPUTS:
        return f"a width of {width} taps: it takes {MOST_TAPS}, {STAGED_OUTPUTS} columns apart"
    return None


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = legality(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    best = min(divisions(problem, hardware), key=lambda way: way.microseconds)
    return Candidate(KERNEL, best.microseconds, direct_wgrad.record(best), notes(best))


def notes(way: Division) -> tuple[str, ...]:
    return (
        f"the lanes of a warp lie along {way.lanes_x} taps of the width times {way.slots} pixels;"
        f" {way.shares} blocks of {WARPS} warps divide the pixels of each channel,"
        f" {way.chunk} at a time",
    )


def divisions(problem: Problem, hardware: Hardware) -> Iterator[Division]:
    """Every way to divide the work that is worth a look."""
    machine, width = hardware.multiprocessors, problem.in_size[-1]
    rows = Division(problem, 0, COLUMNS[-1], width, 1, machine).all_columns
    columns = next(count for count in COLUMNS if count >= rows)
    chunk = Division(problem, 0, columns, width, 1, machine).chunk
    for segment in sorted({width} | {min(width, chunks * chunk) for chunks in PIECES}):
        one = Division(problem, 0, columns, segment, 1, machine)
        most = -(-one.all_units // WARPS)
        wanted = [machine * n // problem.groups for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)]
        for shares in sorted({max(1, min(count, most)) for count in wanted}):
            yield Division(problem, 0, columns, segment, shares, machine)
