"""Sizes, phases and taps of one spatial dimension. Everything else is a product of these.

A transposed convolution sends input position `i` through tap `k` to output position

    o = i * stride - padding + k * dilation

Read backwards, output `o` is reached by exactly those taps for which `o + padding - k * dilation`
is divisible by the stride. Which taps these are depends on `o` only through
`(o + padding) mod stride`, so the outputs fall into `stride` classes, here called *phases*. Inside
a phase, number the outputs `q = 0, 1, 2, ...`; then `o = first + q * stride`, and every tap of the
phase reads input position `q + shift` with a shift that does not depend on `q`. A phase is an
ordinary stride-1 correlation with its own short list of (tap, shift) pairs: no zeros are
multiplied and no two outputs collide.

    example: stride 2, padding 1, kernel 4, dilation 1
      phase first=0: outputs 0, 2, 4, ...  taps (k=1, shift 0), (k=3, shift -1)
      phase first=1: outputs 1, 3, 5, ...  taps (k=0, shift +1), (k=2, shift 0)

The same list serves the gradients. For grad_input, `gx[i] = sum_k w[k] * gy[o(i, k)]`, and tap `k`
of phase `first` reads `gy` at `q = i - shift` of that phase. For grad_weight,
`gw[k] = sum_i x[i] * gy[o(i, k)]` pairs the same two positions.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_PHASES = 2**16
"""Of a dimension, of which there are plans: to list a million took 3 seconds, and 700 MB."""


@dataclass(frozen=True)
class Tap:
    """Weight position `k`, and the input it meets at phase-local output `q`: `q + shift`."""

    k: int
    shift: int


@dataclass(frozen=True)
class Phase:
    """The outputs `first, first + stride, ...` (`count` of them) and the taps that reach them.

    `taps` may be empty (stride > kernel, or dilation and stride share a factor): such outputs get
    the bias or zero.
    """

    first: int
    count: int
    taps: tuple[Tap, ...]


def output_size(
    size: int, kernel: int, stride: int, padding: int, output_padding: int, dilation: int
) -> int:
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


def first_of_tap(k: int, stride: int, padding: int, dilation: int) -> int:
    """The first output of the phase that tap `k` belongs to."""
    return (k * dilation - padding) % stride


def phases(
    size: int, kernel: int, stride: int, padding: int, output_padding: int, dilation: int
) -> tuple[Phase, ...]:
    """The phases of one dimension, ordered by their first output; those without outputs left out.

    Taps that meet no input at any output of the phase are left out as well, so that no kernel
    multiplies by padding alone.
    """
    out = output_size(size, kernel, stride, padding, output_padding, dilation)
    taps: dict[int, list[Tap]] = {}
    for k in range(kernel):
        first = first_of_tap(k, stride, padding, dilation)
        shift = (first + padding - k * dilation) // stride
        if first < out and shift < size and shift + _count(first, out, stride) > 0:
            taps.setdefault(first, []).append(Tap(k, shift))
    return tuple(
        Phase(first, _count(first, out, stride), tuple(taps.get(first, ())))
        for first in range(min(stride, out))
    )


def _count(first: int, out: int, stride: int) -> int:
    """Outputs of a phase."""
    return (out - first + stride - 1) // stride


def halo(dimension_phases: tuple[Phase, ...]) -> tuple[int, int]:
    """Least and greatest shift over all phases: the margin an input tile needs on either side."""
    shifts = [tap.shift for phase in dimension_phases for tap in phase.taps]
    return (min(shifts), max(shifts)) if shifts else (0, 0)


@dataclass(frozen=True)
class GradTap:
    """Weight position `k` seen from the input: at input `i` it meets output `i + shift` of `phase`.

    `phase` is an index into the dimension's phases; the output position is
    `phases[phase].first + (i + shift) * stride`, counted only where `0 <= i + shift < count`.
    """

    k: int
    phase: int
    shift: int


def grad_taps(dimension_phases: tuple[Phase, ...]) -> tuple[GradTap, ...]:
    """The forward taps turned round, ordered by `k`; grad_input and grad_weight both read them.

    grad_input:  gx[i]  = sum over taps of  w[k] * gy[phase, i + shift]
    grad_weight: gw[k]  = sum over inputs of x[i] * gy[phase, i + shift]; taps not listed get zero
    """
    return tuple(
        sorted(
            (
                GradTap(tap.k, index, -tap.shift)
                for index, phase in enumerate(dimension_phases)
                for tap in phase.taps
            ),
            key=lambda tap: tap.k,
        )
    )
