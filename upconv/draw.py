"""The phase picture: which input meets which tap for which output.

A strip for every spatial dimension shows inputs above, outputs below and, on top of each output,
the taps that reach it; beside it stands what stretching the input with zeros would take for one
output. The plane follows in `draw_plane`. Everything is placed on one canvas measured in output
cells, so that the layout is arithmetic and nothing can overlap by accident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from .canvas import (
    FAINT,
    HUES,
    INK,
    MARGIN,
    NARROWEST,
    PALE,
    PAPER,
    Canvas,
    tint,
    width_color,
)
from .draw_plane import draw_plane
from .planner import Phase, Problem, dimension_phases
from .planner.geometry import Tap, output_size, phases

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHIP = 0.7
"""Width of the box that stands for one tap, in cells of 1; a label of two digits fits."""
MOST_CHIPS = 5
"""Taps of one output that are still drawn as boxes; beyond it lines alone show them."""
MOST_OUTPUTS = 30
"""Outputs drawn of one dimension: enough to see the pattern, few enough to read."""
MOST_PLACES = 24
"""Places of the stretched input that one row holds."""
INPUT_FILL = "#e8ecf1"


class DrawingError(ValueError):
    """The picture cannot be made; the text says what to do."""


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

    def example(self) -> int | None:
        """An output for which zeros would cost the most, with the whole kernel on the input.

        None where there are no zeros (stride 1) or too many places to draw.
        """
        if self.stride == 1 or (self.kernel - 1) * self.dilation + 3 > MOST_PLACES:
            return None

        def fitness(o: int) -> tuple[bool, int, float]:
            """The window on the input, then many zeros, then far from the ends."""
            places = [o + self.padding - k * self.dilation for k in range(self.kernel)]
            within = min(places) >= 0 and max(places) <= (self.size - 1) * self.stride
            return within, self.kernel - len(self.meetings(o)), -abs(o - self.outputs / 2)

        met = [o for o in range(self.outputs) if self.meetings(o)]
        best = max(met, key=fitness, default=None)
        return None if best is None or fitness(best)[1] == 0 else best

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
    if strip.size < strip.full_size:
        shown += "; the pattern goes on"
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
    draw_zeros(canvas, strip)


def draw_meetings(canvas: Canvas, strip: Strip, left: float, top: float) -> None:
    """Inputs above, a line from each to every tap box that it feeds, the boxes on the outputs."""
    inputs_low, chips_high = top + 1.0, top + 3.8
    outputs_high = chips_high + (0.66 if strip.chips else 0.0)
    for i in range(strip.last_input + 1):
        center = left + strip.input_center(i)
        half = strip.input_width / 2
        canvas.box(center - half, top, 2 * half, 1.0, INPUT_FILL, PALE)
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


def draw_zeros(canvas: Canvas, strip: Strip) -> None:
    """One output the usual way: the input stretched with zeros, the whole kernel laid over it."""
    o = strip.example()
    if o is None:
        return
    looked = {o + strip.padding - k * strip.dilation: k for k in range(strip.kernel)}
    first, last = min(looked) - 1, max(looked) + 1
    zeros = sum(place % strip.stride != 0 for place in looked)
    words = (
        f"The usual way, for y{o}: zeros put between the inputs, the whole kernel laid on them. "
        f"{zeros} of {strip.kernel} products are with a zero."
    )
    canvas.text(MARGIN, canvas.height + 0.3, words, 0.45, PALE)
    top = canvas.height + 0.95
    for number, place in enumerate(range(first, last + 1)):
        x = MARGIN + number * 1.15
        real = place % strip.stride == 0
        inside = real and 0 <= place // strip.stride < strip.size
        name = f"x{place // strip.stride}" if inside else "0"
        canvas.box(x, top, 1.05, 0.8, INPUT_FILL if inside else PAPER, PALE if inside else FAINT)
        canvas.text(x + 0.525, top + 0.4, name, 0.42, INK if inside else PALE, inside, "center")
        if place in looked:
            color = width_color(o % strip.stride) if inside else FAINT
            fill = tint(color, 0.8) if inside else PAPER
            canvas.box(x + 0.1, top + 0.9, 0.85, 0.6, fill, color)
            ink = INK if inside else PALE
            canvas.text(x + 0.525, top + 1.2, f"w{looked[place]}", 0.36, ink, align="center")
    canvas.height = top + 2.4


CAPTION = (
    "x: inputs, y: outputs, w: the taps, which are the weights of the kernel.",
    "One line, one product: the x at its upper end times the w at its lower end. Sums make the y.",
    "No zeros: only the taps that reach an output stand above it; dashed ones lie off the input.",
    "No atomics: all products of an output meet in one place, so whoever adds them writes it once.",
    "Outputs of one colour form a phase: they meet the same taps, shifted along.",
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
    if problem.ndim > 1:
        draw_plane(canvas, problem)
    draw_count(canvas, problem)


def draw_count(canvas: Canvas, problem: Problem) -> None:
    """What is saved: every tap belongs to one phase, so that the phases share the kernel out."""
    taps, share = prod(problem.kernel), prod(problem.stride)
    if share > 1:
        words = (
            f"Products per output and channel pair: {taps} the usual way, "
            f"{taps / share:.3g} on average by phases."
        )
        canvas.text(MARGIN, canvas.height, words, 0.5, bold=True)
        canvas.height += 0.9
