"""A layer as the Hopper kernel that walks sees it (upconv/planner/sm90_walk.py): pixels, what they
read, and where they go, in the dimension of the walk, in rows and in columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem

OCTET = 8
"""Pixels that lie side by side at least."""
PIECE_BYTES = 16
"""With which a box begins, and of which its rows have whole ones."""


@dataclass(frozen=True)
class Axis:
    """One dimension: outputs, and what they read.

    Output q meets tap `first tap + i` at input q + low + i * step.
    """

    in_size: int = 1
    out_size: int = 1
    taps: int = 1
    low: int = 0
    step: int = 1


def axis(problem: Problem, dimension: int) -> Axis:
    size, taps, _, padding, _, dilation = problem.dimensions[dimension]
    out = problem.out_size[dimension]
    step = dilation if taps > 1 else 1
    if problem.direction == "grad_input":
        return Axis(out, size, taps, -padding, step)
    return Axis(size, out, taps, padding - (taps - 1) * step, step)


@dataclass(frozen=True)
class Layer:
    """A problem as the kernel sees it: the walk, rows, columns."""

    problem: Problem
    axes: tuple[Axis, Axis, Axis]

    @property
    def backward(self) -> bool:
        return self.problem.direction == "grad_input"

    @property
    def in_channels(self) -> int:
        return self.problem.out_channels if self.backward else self.problem.in_channels

    @property
    def out_channels(self) -> int:
        return self.problem.in_channels if self.backward else self.problem.out_channels

    @property
    def skew(self) -> int:
        """Pixels left of the image with which octets begin: windows begin with even inputs."""
        return self.axes[2].low % 2

    @property
    def lead(self) -> int:
        """Boxes begin on 16 bytes: elements before the first that a tap wants."""
        return (self.axes[2].low - self.skew) % (PIECE_BYTES // self.problem.element_bytes)

    @property
    def octets(self) -> int:
        """Of a row."""
        return -(-(self.axes[2].out_size + self.skew) // OCTET)


def layer_of(problem: Problem) -> Layer:
    """Of stride 1. Images are walked through row by row. (As whole planes of a walk they took
    longer than by the kernel for all layers, whatever their size.)"""
    axes = [axis(problem, i) for i in range(problem.ndim)]
    if problem.ndim == 2:
        return Layer(problem, (axes[0], Axis(), axes[1]))
    return Layer(problem, (*([Axis()] * (3 - problem.ndim)), *axes))  # type: ignore[arg-type]
