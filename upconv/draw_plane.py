"""The phases in the plane: the output grid coloured by phase, and the weights each phase uses.

Of a volume the planes of one depth are drawn; they repeat along the depth as pixels do.
"""

from __future__ import annotations

from itertools import product
from math import prod

from .canvas import FAINT, MARGIN, PALE, PAPER, Canvas, cell_color, ink_on
from .planner import Phase, Problem, dimension_phases

MOST_TAP_GRIDS = 16
"""Stride 4 in the plane. Where there are more phases, eight stand for them."""
TAP_GRID_WIDTH = 6.2
"""Room for one small kernel and for the heading over it."""


def draw_plane(canvas: Canvas, problem: Problem) -> None:
    """The output plane; beside it the part of the kernel each phase uses."""
    vertical, horizontal = dimension_phases(problem)[-2:]
    strides = problem.stride[-2:]
    rows, columns = (
        min(size, max(6, 2 * stride), 12)
        for size, stride in zip(problem.out_size[-2:], strides, strict=True)
    )
    top = canvas.height
    place = "In the plane" if problem.ndim == 2 else "In a plane of one depth"
    canvas.text(MARGIN, top + 0.5, f"{place}: both directions together", 0.6, bold=True)
    lines = (
        "Left, the outputs: pixels of one colour and shade form a phase. They do the same work.",
        "Right, for each phase the weights (row,column) it needs: blank ones are never touched.",
    )
    for number, words in enumerate(lines):
        canvas.text(MARGIN, top + 1.35 + 0.65 * number, words, 0.45, PALE)
    top += 2.9
    for y, x in product(range(rows), range(columns)):
        a, b = y % strides[0], x % strides[1]
        used = vertical[a].taps and horizontal[b].taps
        fill = cell_color(a, b, len(vertical)) if used else PAPER
        canvas.box(MARGIN + x, top + y, 1.0, 1.0, fill, PAPER if fill != PAPER else FAINT)
        if y < strides[0] and x < strides[1]:
            middle = (MARGIN + x + 0.5, top + y + 0.5)
            canvas.text(*middle, f"{y},{x}", 0.36, ink_on(fill), True, "center")
    bottom = draw_tap_grids(canvas, problem, MARGIN + columns + 1.5, top)
    canvas.height = max(top + rows, bottom) + 0.8
    if problem.ndim == 3:
        draw_depths(canvas, problem)


def draw_tap_grids(canvas: Canvas, problem: Problem, left: float, top: float) -> float:
    """The kernel once per phase, the taps it uses filled in. Returns where it ends."""
    vertical, horizontal = dimension_phases(problem)[-2:]
    kernel = problem.kernel[-2:]
    # Up to 6x6 the weights are large enough for their numbers.
    cell = min(0.7, 4.2 / max(kernel))
    high = kernel[0] * cell + 1.5
    per_row = max(1, int((canvas.width - left) // TAP_GRID_WIDTH))
    if len(horizontal) <= per_row:
        per_row = len(horizontal)  # the small kernels then stand as their pixels do
    combinations = list(product(enumerate(vertical), enumerate(horizontal)))
    shown = combinations[: 8 if len(combinations) > MOST_TAP_GRIDS else None]
    for number, ((a, down), (b, across)) in enumerate(shown):
        x, y = left + number % per_row * TAP_GRID_WIDTH, top + number // per_row * high
        used = {(v.k, h.k) for v, h in product(down.taps, across.taps)}
        share = f"{len(used)} of {prod(kernel)} weights" if used else "bias alone"
        canvas.text(x, y + 0.2, f"like {a},{b}: {share}", 0.4, bold=True)
        color = cell_color(a, b, len(vertical))
        draw_kernel(canvas, (x, y + 0.6), kernel, used, (cell, color))
    bottom = top + -(-len(shown) // per_row) * high
    if len(combinations) > len(shown):
        more = len(combinations) - len(shown)
        canvas.text(left, bottom, f"and {more} more phases", 0.45, PALE)
        bottom += 0.6
    return bottom


def draw_kernel(
    canvas: Canvas,
    corner: tuple[float, float],
    kernel: tuple[int, ...],
    used: set[tuple[int, int]],
    look: tuple[float, str],
) -> None:
    """All weights as a grid, the used ones filled. `look` is the side of a cell and the colour."""
    cell, color = look
    for row, column in product(range(kernel[0]), range(kernel[1])):
        x, y = corner[0] + column * cell, corner[1] + row * cell
        canvas.box(x, y, cell, cell, color if (row, column) in used else PAPER, FAINT)
        if (row, column) in used and cell > 0.5:
            middle = (x + cell / 2, y + cell / 2)
            canvas.text(*middle, f"{row},{column}", 0.27, ink_on(color), align="center")


def draw_depths(canvas: Canvas, problem: Problem) -> None:
    """How often a plane needs these weights: once for each tap that reaches its depth."""
    for phase in dimension_phases(problem)[0][:8]:
        canvas.text(MARGIN, canvas.height, depth_words(phase, problem.stride[0]), 0.5)
        canvas.height += 0.85
    canvas.height += 0.4


def depth_words(phase: Phase, stride: int) -> str:
    depths = ", ".join(str(phase.first + n * stride) for n in range(min(3, phase.count)))
    if not phase.taps:
        return f"At depth {depths}, ... no tap reaches: bias alone."
    taps = ", ".join(f"w{tap.k}" for tap in phase.taps)
    times = {1: "once", 2: "twice"}.get(len(phase.taps), f"{len(phase.taps)} times")
    return f"At depth {depths}, ... these weights are needed {times}: for the depth's {taps}."
