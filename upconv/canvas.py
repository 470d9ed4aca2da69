"""Shapes and words on one canvas measured in output cells: what the phase picture is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, PALE, FAINT, PAPER = "#1d2733", "#66727f", "#c9d0d8", "#ffffff"
HUES = ("#1f6fb4", "#d9622b", "#2b8a57", "#8a4fb0", "#b8860b", "#c2306b", "#138d90", "#7a5c3e")
"""One for each phase of a dimension; they repeat beyond eight, where the eye gives up anyway."""

MARGIN = 1.0
NARROWEST = 28.0
"""Least width of the canvas: the captions need it."""


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


def ink_on(fill: str) -> str:
    """Dark or white letters, whichever can be read on the colour."""
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else PAPER
