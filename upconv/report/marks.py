"""SVG in percentages: charts as wide as the screen, with letters and marks that stay their size.

Everything is placed by a `Scale`, whose positions are percentages of the width or height. Marks
differ in shape as well as in colour, so that no one has to tell colours apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

SHAPES = {
    "upconv": '<circle r="6"/>',
    "torch": '<rect x="-5" y="-5" width="10" height="10"/>',
    "benchmark": '<path d="M0-6.5 6.5 0 0 6.5-6.5 0Z"/>',
    "channels_last": '<path d="M0-6.5 6 5H-6Z"/>',
    "compile": '<path d="M0 6.5 6-5H-6Z"/>',
}
"""A shape for each contender, around the origin."""


@dataclass(frozen=True)
class Scale:
    """Logarithmic: `low` and `high` are the values at the percentages `start` and `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = log10(value / self.low) / log10(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, steps: tuple[int, ...] = (1, 2, 5)) -> list[float]:
        """Round numbers between low and high."""
        first, last = floor(log10(self.low)), ceil(log10(self.high))
        every = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [tick for tick in every if self.low <= tick <= self.high]

    def doublings(self) -> list[float]:
        """1 and what doubling and halving make of it, at most about nine of them."""
        powers = range(-30, 31)
        every = [p for p in powers if self.low <= 2.0**p <= self.high]
        step = 1 if len(every) <= 9 else 2
        return [2.0**p for p in every if p % step == 0]


def percent(value: float) -> str:
    return f"{value:.2f}%"


def number(value: float) -> str:
    """Three digits that matter: 0.71, 12.3, 421."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def times(value: float) -> str:
    """12.3×, and never 1.00× for what is not even."""
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×" if value < 100 else f"{value:.0f}×"


def attributes(**values: object) -> str:
    """class_="a" -> class="a"; data_dtype="b" -> data-dtype="b"."""
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in values.items()
        if value is not None
    )


def text(x: str, y: str, words: str, **more: object) -> str:
    return f"<text{attributes(x=x, y=y, **more)}>{escape(words)}</text>"


def line(x1: str, y1: str, x2: str, y2: str, **more: object) -> str:
    return f"<line{attributes(x1=x1, y1=y1, x2=x2, y2=y2, **more)}/>"


def mark(x: str, y: str, name: str, title: str = "", hollow: bool = False) -> str:
    """A contender's shape; hollow where its time is PyTorch's own."""
    said = f"<title>{escape(title)}</title>" if title else ""
    style = f"mark {name}{' hollow' if hollow else ''}"
    return f'<svg x="{x}" y="{y}" class="{style}" overflow="visible">{said}{SHAPES[name]}</svg>'


def swatch(name: str, hollow: bool = False) -> str:
    """The same shape in running text, for legends."""
    style = f"mark {name}{' hollow' if hollow else ''}"
    shape = SHAPES[name]
    return (
        f'<svg class="swatch" width="16" height="16" viewBox="-8 -8 16 16" aria-hidden="true">'
        f'<g class="{style}">{shape}</g></svg>'
    )
