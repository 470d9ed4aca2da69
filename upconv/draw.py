"""The phase picture: which input meets which tap for which output.

A strip for every spatial dimension shows inputs above, outputs below and, on top of each output,
the taps that reach it. In two dimensions the output grid follows, and for each phase the part of
the kernel that it uses. Everything is placed on one canvas measured in output cells, so that the
layout is arithmetic and nothing can overlap by accident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from .planner import Phase, Problem, dimension_phases
from .planner.geometry import Tap, output_size, phases

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE, FAINT, PAPER = "#1d2733", "#66727f", "#c9d0d8", "#ffffff"
HUES = ("#1f6fb4", "#d9622b", "#2b8a57", "#8a4fb0", "#b8860b", "#c2306b", "#138d90", "#7a5c3e")
"""One for each phase of a dimension; they repeat beyond eight, where the eye gives up anyway."""

CHIP = 0.7
"""Width of the box that stands for one tap, in cells of 1; a label of two digits fits."""
MOST_CHIPS = 5
"""Taps of one output that are still drawn as boxes; beyond it lines alone show them."""
MOST_OUTPUTS = 30
"""Outputs drawn of one dimension: enough to see the pattern, few enough to read."""
MARGIN = 1.0
NARROWEST = 28.0
"""Least width of the canvas: the captions need it."""
MOST_TAP_GRIDS = 16
"""Stride 4 in the plane. Where there are more phases, eight stand for them."""


class DrawingError(Exception):
    """The picture cannot be made; the text says what to do."""


@dataclass
class Canvas:
    """Shapes and words placed so far, y growing downwards; `height` is how far they reach."""

    axes: Axes
    points: float
    """Font points of text one cell high."""
    height: float = 0.0
    width: float = field(default=NARROWEST)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 0.5,
        color: str = INK,
        bold: bool = False,
        align: str = "left",
    ) -> None:
        self.axes.text(
            x,
            y,
            words,
            fontsize=size * self.points,
            color=color,
            weight="bold" if bold else "normal",
            ha=align,
            va="center",
        )

    def box(
        self,
        x: float,
        y: float,
        wide: float,
        high: float,
        fill: str,
        edge: str,
        dashed: bool = False,
    ) -> None:
        from matplotlib.patches import Rectangle

        style = (0, (2, 2)) if dashed else "solid"
        self.axes.add_patch(
            Rectangle((x, y), wide, high, facecolor=fill, edgecolor=edge, lw=0.8, linestyle=style)
        )

    def line(self, x0: float, y0: float, x1: float, y1: float, color: str) -> None:
        self.axes.plot([x0, x1], [y0, y1], color=color, lw=1.1, solid_capstyle="round", zorder=0.5)


def tint(color: str, amount: float) -> str:
    """The colour mixed with white: 0 leaves it, 1 is white."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * amount):02x}" for part in parts)


def width_color(index: int) -> str:
    return HUES[index % len(HUES)]


def cell_color(height_index: int, width_index: int, height_phases: int) -> str:
    """Hue by the width phase, shade by the height phase."""
    return tint(width_color(width_index), 0.15 + 0.65 * height_index / max(1, height_phases))


@dataclass(frozen=True)
class Strip:
    """One dimension, cut to a length that can be drawn."""

    axes: str
    """Names of the dimensions it stands for: "height and width" where both are alike."""
    size: int
    kernel: int
    stride: int
    padding: int
    output_padding: int
    dilation: int
    full_size: int

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        return (
            self.size,
            self.kernel,
            self.stride,
            self.padding,
            self.output_padding,
            self.dilation,
        )

    @property
    def phases(self) -> tuple[Phase, ...]:
        return phases(*self.numbers)

    @property
    def outputs(self) -> int:
        return min(MOST_OUTPUTS, output_size(*self.numbers))

    def meetings(self, o: int) -> list[tuple[Tap, int]]:
        """The taps of output `o` with the input each one asks for, which may lie outside."""
        phase = self.phases[o % self.stride]
        return sorted(
            ((tap, o // self.stride + tap.shift) for tap in phase.taps), key=lambda pair: pair[1]
        )

    @property
    def chips(self) -> int:
        """Boxes above an output, or 0 where they would be too many."""
        most = max((len(phase.taps) for phase in self.phases), default=0)
        return most if most <= MOST_CHIPS else 0

    @property
    def pitch(self) -> float:
        """Width of one output cell with its gap."""
        return max(1.15, self.chips * (CHIP + 0.06) + 0.3)

    @property
    def wide(self) -> float:
        reach = self.input_center(min(self.size - 1, self.last_input)) + 1.0
        return max(self.outputs * self.pitch, reach) - min(0.0, self.input_center(0) - 1.0)

    @property
    def last_input(self) -> int:
        if self.outputs == output_size(*self.numbers):
            return self.size - 1
        asked = [i for o in range(self.outputs) for _, i in self.meetings(o) if i < self.size]
        return max(asked, default=self.size - 1)

    def input_center(self, i: int) -> float:
        """Above the middle of the outputs it reaches."""
        middle = i * self.stride - self.padding + (self.kernel - 1) * self.dilation / 2
        return (middle + 0.5) * self.pitch

    @property
    def input_width(self) -> float:
        return min(1.5, 0.88 * self.stride * self.pitch)


def cut(size: int, numbers: tuple[int, int, int, int, int]) -> int:
    """How many inputs to draw: five if the outputs fit, fewer for long strides, never too few."""
    fewest = min(size, 2)
    for inputs in range(min(size, 5), fewest, -1):
        if 0 < output_size(inputs, *numbers) <= 14:
            return inputs
    while output_size(fewest, *numbers) < 1:
        fewest += 1
    return fewest


def strips_of(problem: Problem) -> list[Strip]:
    """A strip for each dimension; dimensions with the same numbers share one."""
    names = {1: ("the",), 2: ("height", "width"), 3: ("depth", "height", "width")}[problem.ndim]
    alike: dict[tuple[int, ...], list[int]] = {}
    columns = list(
        zip(
            problem.kernel,
            problem.stride,
            problem.padding,
            problem.output_padding,
            problem.dilation,
            strict=True,
        )
    )
    for axis, numbers in enumerate(columns):
        alike.setdefault((*numbers, cut(problem.in_size[axis], numbers)), []).append(axis)
    return [
        Strip(
            " and ".join(", ".join(names[axis] for axis in axes).rsplit(", ", 1)),
            cut(problem.in_size[axes[0]], columns[axes[0]]),
            *columns[axes[0]],
            full_size=problem.in_size[axes[0]],
        )
        for axes in alike.values()
    ]


def equation(phase: Phase, stride: int) -> str:
    """y[2q+1] = w0·x[q+1] + w2·x[q]"""
    place = f"{stride}q" if stride > 1 else "q"
    left = f"y[{place}{f'+{phase.first}' if phase.first else ''}]"
    sums = [f"w{t.k}·x[q{f'{t.shift:+d}' if t.shift else ''}]" for t in phase.taps]
    if len(sums) > 8:
        sums = [*sums[:7], "…"]
    return f"{left} = {' + '.join(sums) or 'bias alone: no tap reaches it'}"


def draw_strip(canvas: Canvas, strip: Strip) -> None:
    top = canvas.height
    left = MARGIN - min(0.0, strip.input_center(0) - 1.0)
    options = [f"kernel {strip.kernel}", f"stride {strip.stride}"]
    for name, value, usual in (
        ("padding", strip.padding, 0),
        ("output padding", strip.output_padding, 0),
        ("dilation", strip.dilation, 1),
    ):
        if value != usual:
            options.append(f"{name} {value}")
    shown = f"{strip.size} inputs" + (f" of {strip.full_size}" * (strip.size < strip.full_size))
    heading = "Along the line" if strip.axes == "the" else f"Along {strip.axes}"
    canvas.text(MARGIN, top + 0.5, f"{heading}: {', '.join(options)}", 0.6, bold=True)
    canvas.text(MARGIN, top + 1.35, f"drawn for {shown}", 0.45, PALE)
    canvas.height = top + 2.1
    draw_meetings(canvas, strip, left, canvas.height)
    for index, phase in enumerate(strip.phases[: len(HUES)]):
        y = canvas.height + 0.45
        color = width_color(index)
        fill = tint(color, 0.55) if phase.taps else PAPER
        canvas.box(MARGIN, y - 0.25, 0.5, 0.5, fill, color, dashed=not phase.taps)
        canvas.text(MARGIN + 0.9, y, equation(phase, strip.stride), 0.5)
        canvas.height += 0.85
    more = len(strip.phases) - len(HUES)
    if more > 0:
        canvas.text(MARGIN + 0.9, canvas.height + 0.4, f"and {more} more phases", 0.5, PALE)
        canvas.height += 0.85
    canvas.height += 0.7


def draw_meetings(canvas: Canvas, strip: Strip, left: float, top: float) -> None:
    """Inputs above, a line from each to every tap box that it feeds, the boxes on the outputs."""
    inputs_low, chips_high = top + 1.0, top + 3.8
    outputs_high = chips_high + (0.66 if strip.chips else 0.0)
    for i in range(strip.last_input + 1):
        center = left + strip.input_center(i)
        half = strip.input_width / 2
        canvas.box(center - half, top, 2 * half, 1.0, "#e8ecf1", PALE)
        canvas.text(center, top + 0.5, f"x{i}", 0.5, bold=True, align="center")
    for o in range(strip.outputs):
        color = width_color(o % strip.stride)
        meetings = strip.meetings(o)
        center = left + (o + 0.5) * strip.pitch
        taps = len(meetings)
        for place, (tap, i) in enumerate(meetings):
            inside = 0 <= i < strip.size
            step = CHIP + 0.06 if strip.chips else 0.0
            x = center + (place - (taps - 1) / 2) * step
            if inside:
                canvas.line(left + strip.input_center(i), inputs_low, x, chips_high, color)
            if strip.chips:
                fill = tint(color, 0.8) if inside else PAPER
                edge = color if inside else FAINT
                canvas.box(x - CHIP / 2, chips_high, CHIP, 0.6, fill, edge, dashed=not inside)
                ink = INK if inside else FAINT
                canvas.text(x, chips_high + 0.3, f"w{tap.k}", 0.34, ink, align="center")
        half = strip.pitch / 2 - 0.06
        fill = tint(color, 0.55) if taps else PAPER
        canvas.box(center - half, outputs_high, 2 * half, 0.9, fill, color, dashed=not taps)
        canvas.text(center, outputs_high + 0.45, f"y{o}", 0.42, bold=True, align="center")
    if strip.outputs < output_size(*strip.numbers):
        canvas.text(left + strip.outputs * strip.pitch + 0.2, outputs_high + 0.45, "…", 0.6)
    canvas.height = outputs_high + 1.3


def draw_grid(canvas: Canvas, problem: Problem) -> None:
    """The output plane coloured by phase; beside it the part of the kernel each phase uses."""
    both = dimension_phases(problem)
    rows, columns = (
        min(size, max(6, 2 * stride), 12)
        for size, stride in zip(problem.out_size, problem.stride, strict=True)
    )
    top = canvas.height
    canvas.text(MARGIN, top + 0.5, "In the plane: output pixels coloured by phase", 0.6, bold=True)
    left = "left: colour is the phase along the width, shade the phase along the height"
    right = "right: the weights (row,column) of the kernel that each phase uses"
    canvas.text(MARGIN, top + 1.35, left, 0.45, PALE)
    canvas.text(MARGIN, top + 2.0, right, 0.45, PALE)
    top += 2.9
    for y, x in product(range(rows), range(columns)):
        a, b = y % problem.stride[0], x % problem.stride[1]
        fill = cell_color(a, b, len(both[0])) if both[0][a].taps and both[1][b].taps else PAPER
        canvas.box(MARGIN + x, top + y, 1.0, 1.0, fill, PAPER if fill != PAPER else FAINT)
        if y < problem.stride[0] and x < problem.stride[1]:
            canvas.text(MARGIN + x + 0.5, top + y + 0.5, f"{y},{x}", 0.36, INK, True, "center")
    bottom = draw_tap_grids(canvas, problem, MARGIN + columns + 1.5, top)
    canvas.height = max(top + rows, bottom) + 0.8


TAP_GRID_WIDTH = 5.0
"""Room for one small kernel and for the heading over it."""


def tap_grid_cell(problem: Problem) -> float:
    """Side of one weight in the small kernels: 0.6 up to 6x6, smaller for large kernels."""
    return min(0.6, 3.6 / max(problem.kernel))


def draw_tap_grids(canvas: Canvas, problem: Problem, left: float, top: float) -> float:
    """The kernel once per phase, the taps it uses filled in. Returns where it ends."""
    height_phases, width_phases = dimension_phases(problem)
    cell = tap_grid_cell(problem)
    wide, high = TAP_GRID_WIDTH, problem.kernel[0] * cell + 1.5
    per_row = max(1, int((canvas.width - left) // wide))
    if len(width_phases) <= per_row:
        per_row = len(width_phases)  # the small kernels then stand as their pixels do
    combinations = list(product(enumerate(height_phases), enumerate(width_phases)))
    shown = combinations[: 8 if len(combinations) > MOST_TAP_GRIDS else None]
    for number, ((a, vertical), (b, horizontal)) in enumerate(shown):
        x, y = left + number % per_row * wide, top + number // per_row * high
        color = cell_color(a, b, len(height_phases))
        used = {(v.k, h.k) for v, h in product(vertical.taps, horizontal.taps)}
        taps = f"{len(used)} tap{'s' * (len(used) != 1)}" if used else "bias alone"
        canvas.text(x, y + 0.2, f"from {a},{b}: {taps}", 0.4, bold=True)
        for k in product(range(problem.kernel[0]), range(problem.kernel[1])):
            place = (x + k[1] * cell, y + 0.6 + k[0] * cell)
            canvas.box(*place, cell, cell, color if k in used else PAPER, FAINT)
            if k in used and cell > 0.5:
                canvas.text(
                    place[0] + cell / 2, place[1] + cell / 2, f"{k[0]},{k[1]}", 0.25, align="center"
                )
    bottom = top + -(-len(shown) // per_row) * high
    if len(combinations) > len(shown):
        more = len(combinations) - len(shown)
        canvas.text(left, bottom, f"and {more} more phases", 0.45, PALE)
        bottom += 0.6
    return bottom


CAPTION = (
    "One line, one product: the input x at its upper end times the tap w at its lower end.",
    "No zeros: only the taps that reach an output y stand above it; dashed ones lie off the input.",
    "No atomics: all products of an output meet in one place, so whoever adds them writes it once.",
)


def draw(problem: Problem, path: str | Path) -> Path:
    """Draws the phases of `problem` into `path`, whose ending says the format: .svg or .png."""
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise DrawingError(f"a drawing is written as .svg or .png, not as {path.name!r}")
    figure = figure_of(problem)
    from matplotlib import rc_context

    # The same picture is the same file: no date in it, and no random names.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    try:
        with rc_context({"svg.hashsalt": "upconv"}):
            figure.savefig(path, dpi=130, metadata=metadata)
    except OSError as error:
        raise DrawingError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def figure_of(problem: Problem) -> Figure:
    """The picture as a matplotlib figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DrawingError(
            "drawing needs matplotlib, which is not installed: pip install 'upconv[plot]'"
        ) from error
    strips = strips_of(problem)
    width = max(NARROWEST, *(strip.wide + 2 * MARGIN for strip in strips))
    inches = min(0.46, 15 / width)
    figure = Figure(facecolor=PAPER)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    canvas = Canvas(axes, points=inches * 72, width=width)
    draw_all(canvas, problem, strips)
    axes.set_xlim(0, width)
    axes.set_ylim(canvas.height, 0)
    axes.set_axis_off()
    figure.set_size_inches(width * inches, canvas.height * inches)
    return figure


def draw_all(canvas: Canvas, problem: Problem, strips: Sequence[Strip]) -> None:
    count = 1
    for dimension in dimension_phases(problem):
        count *= len(dimension)
    kernel = "x".join(map(str, problem.kernel))
    stride = "x".join(map(str, problem.stride[: 1 if len(set(problem.stride)) == 1 else None]))
    title = f"ConvTranspose{problem.ndim}d, kernel {kernel}, stride {stride}"
    canvas.text(MARGIN, 1.1, f"{title}: {count} phase{'s' * (count > 1)}", 0.8, bold=True)
    canvas.height = 2.2
    for sentence in CAPTION:
        canvas.text(MARGIN, canvas.height + 0.1, sentence, 0.46, PALE)
        canvas.height += 0.75
    canvas.height += 0.5
    for strip in strips:
        draw_strip(canvas, strip)
    if problem.ndim == 2:
        draw_grid(canvas, problem)
