"""One spatial dimension as the GPU kernels see it: points, phases and taps.

    output = q * out_step + first        input = q * in_step + shift

Every direction of the operator has this form, so that one kernel with one tap table can serve more
than one of them: the forward pass has `stride` phases and reads with step 1, the gradient of the
input has one phase and reads with step `stride`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .geometry import Tap, first_of_tap, output_size
from .problem import Problem


@dataclass(frozen=True)
class Lattice:
    """The phases of one dimension; `firsts[i]` and `taps[i]` belong to phase i."""

    in_step: int
    out_step: int
    size: int
    firsts: tuple[int, ...]
    taps: tuple[tuple[Tap, ...], ...]
    rule: tuple[int, int, int, int]
    """Of first, a base, of shift, step: tap k of a phase reads at a shift where k * step = first *
    of_first + base - shift * of_shift. The taps above follow from it, as a compiled kernel finds
    them that has no room for a list."""

    @staticmethod
    def of(problem: Problem, dimension: int) -> Lattice:
        """The forward pass: the phases of geometry.py."""
        size, kernel, stride, padding, extra, dilation = problem.dimensions[dimension]
        out = output_size(size, kernel, stride, padding, extra, dilation)
        firsts = tuple(range(min(stride, out)))
        taps: list[list[Tap]] = [[] for _ in firsts]
        for k in range(kernel):
            first = first_of_tap(k, stride, padding, dilation)
            if first < len(firsts):
                taps[first].append(Tap(k, (first + padding - k * dilation) // stride))
        rule = (1, padding, stride, dilation)
        return Lattice(1, stride, out, firsts, tuple(map(tuple, taps)), rule)

    @staticmethod
    def of_input_gradient(problem: Problem, dimension: int) -> Lattice:
        """The gradient of the input: "output" is grad_input here, "input" is grad_output."""
        size, kernel, stride, padding, _, dilation = problem.dimensions[dimension]
        taps = tuple(Tap(k, k * dilation - padding) for k in range(kernel))
        return Lattice(stride, 1, size, (0,), (taps,), (-stride, padding, -1, dilation))

    @staticmethod
    def point() -> Lattice:
        """A dimension that is not there: one position, one tap."""
        return Lattice(1, 1, 1, (0,), ((Tap(0, 0),),), (1, 0, 1, 1))

    def stacked(self, count: int) -> Lattice:
        """`count` neighbouring points as one, with the phases of all of them: outputs that share
        their taps become phases, so that few output channels can still fill a tall block."""
        phases = [
            (i * self.out_step + first, tuple(Tap(t.k, t.shift + i * self.in_step) for t in taps))
            for i in range(count)
            for first, taps in zip(self.firsts, self.taps, strict=True)
            if i * self.out_step + first < self.size
        ]
        return Lattice(
            self.in_step * count,
            self.out_step * count,
            self.size,
            tuple(first for first, _ in phases),
            tuple(taps for _, taps in phases),
            self.rule,
        )

    @property
    def count(self) -> int:
        """Lattice points that cover all outputs."""
        return -(-self.size // self.out_step)
