"""One dimension against brute force: every combination of small sizes, none sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from upconv.planner.geometry import Phase, grad_taps, halo, output_size, phases
from upconv.planner.lattice import Lattice
from upconv.planner.problem import Problem

Dimension = tuple[int, int, int, int, int, int]
"""size, kernel, stride, padding, output_padding, dilation: the argument order of `phases`."""

Meeting = tuple[int, int, int]
"""(output, tap, input): one product that the operation consists of."""


def every_dimension() -> Iterator[Dimension]:
    for size, kernel, stride, padding, dilation in product(
        range(1, 7), range(1, 7), range(1, 6), range(5), range(1, 5)
    ):
        for output_padding in range(max(stride, dilation)):
            dimension = (size, kernel, stride, padding, output_padding, dilation)
            if output_size(*dimension) > 0:
                yield dimension


DIMENSIONS = list(every_dimension())


def brute_force(dimension: Dimension) -> Counter[Meeting]:
    """The definition: every input goes through every tap to one place, kept if it is inside."""
    size, kernel, stride, padding, _, dilation = dimension
    places = (
        (i * stride - padding + k * dilation, k, i) for i in range(size) for k in range(kernel)
    )
    return Counter(place for place in places if 0 <= place[0] < output_size(*dimension))


def by_forward_taps(dimension: Dimension, found: tuple[Phase, ...]) -> Counter[Meeting]:
    size, stride = dimension[0], dimension[2]
    return Counter(
        (phase.first + q * stride, tap.k, q + tap.shift)
        for phase in found
        for tap in phase.taps
        for q in range(phase.count)
        if 0 <= q + tap.shift < size
    )


def by_grad_taps(dimension: Dimension, found: tuple[Phase, ...]) -> Counter[Meeting]:
    size, stride = dimension[0], dimension[2]
    return Counter(
        (found[tap.phase].first + (i + tap.shift) * stride, tap.k, i)
        for tap in grad_taps(found)
        for i in range(size)
        if 0 <= i + tap.shift < found[tap.phase].count
    )


def test_the_sweep_is_dense() -> None:
    """Every value of every parameter occurs, and whatever the sweep lacks has no output."""
    assert len(DIMENSIONS) == len(set(DIMENSIONS)) > 8_000
    swept = set(DIMENSIONS)
    for dimension in product(
        range(1, 7), range(1, 7), range(1, 6), range(5), range(5), range(1, 5)
    ):
        legal = dimension[4] < max(dimension[2], dimension[5]) and output_size(*dimension) > 0
        assert (dimension in swept) == legal, dimension


def test_forward_taps_are_the_definition() -> None:
    for dimension in DIMENSIONS:
        assert by_forward_taps(dimension, phases(*dimension)) == brute_force(dimension), dimension


def test_grad_taps_are_the_definition() -> None:
    """grad_input sums the meetings by input, grad_weight by tap: both need exactly this set."""
    for dimension in DIMENSIONS:
        assert by_grad_taps(dimension, phases(*dimension)) == brute_force(dimension), dimension


def test_phases_split_the_output() -> None:
    """Each output belongs to one phase: nothing is written twice, nothing is left out."""
    for dimension in DIMENSIONS:
        stride = dimension[2]
        outputs = [
            phase.first + q * stride for phase in phases(*dimension) for q in range(phase.count)
        ]
        assert sorted(outputs) == list(range(output_size(*dimension))), dimension


def test_no_tap_without_work_and_no_phase_without_outputs() -> None:
    for dimension in DIMENSIONS:
        size = dimension[0]
        for phase in phases(*dimension):
            assert phase.count > 0, dimension
            for tap in phase.taps:
                assert any(0 <= q + tap.shift < size for q in range(phase.count)), dimension


def test_phases_without_taps_occur() -> None:
    """Their outputs are bias alone. Two causes: few taps, and a factor shared with dilation."""
    empty = {
        dimension for dimension in DIMENSIONS if any(not phase.taps for phase in phases(*dimension))
    }
    assert len(empty) > 1000
    assert (3, 2, 3, 0, 0, 1) in empty  # stride 3, two taps: every third output has none
    assert (3, 3, 2, 0, 0, 2) in empty  # stride 2, dilation 2: odd outputs have none


def test_halo_is_the_reach_of_the_shifts() -> None:
    for dimension in DIMENSIONS:
        found = phases(*dimension)
        shifts = {tap.shift for phase in found for tap in phase.taps} or {0}
        assert halo(found) == (min(shifts), max(shifts)), dimension


def tap_lists_in_numbers(
    dimension: Dimension, x: list[float], w: list[float], gy: list[float]
) -> tuple[list[float], list[float], list[float]]:
    """Forward, grad_input and grad_weight, computed as the kernels do: phase by phase."""
    size, kernel, stride = dimension[:3]
    found = phases(*dimension)
    y = [0.0] * output_size(*dimension)
    gx, gw = [0.0] * size, [0.0] * kernel
    for phase in found:
        for q, tap in product(range(phase.count), phase.taps):
            if 0 <= q + tap.shift < size:
                y[phase.first + q * stride] += w[tap.k] * x[q + tap.shift]
    for tap in grad_taps(found):
        for i in range(size):
            if 0 <= i + tap.shift < found[tap.phase].count:
                g = gy[found[tap.phase].first + (i + tap.shift) * stride]
                gx[i] += w[tap.k] * g
                gw[tap.k] += x[i] * g
    return y, gx, gw


@pytest.mark.slow
def test_tap_lists_give_pytorchs_numbers() -> None:
    """Ties brute force to the operator users know. Small whole numbers, so equality is exact."""
    for dimension in DIMENSIONS:
        size, kernel, stride, padding, output_padding, dilation = dimension
        x = torch.randint(-4, 5, (1, 1, size)).double().requires_grad_()
        w = torch.randint(-4, 5, (1, 1, kernel)).double().requires_grad_()
        y = F.conv_transpose1d(x, w, None, stride, padding, output_padding, 1, dilation)
        gy = torch.randint(-4, 5, y.shape).double()
        gx, gw = torch.autograd.grad(y, (x, w), gy)
        mine = tap_lists_in_numbers(
            dimension, x.flatten().tolist(), w.flatten().tolist(), gy.flatten().tolist()
        )
        theirs = tuple(t.detach().flatten().tolist() for t in (y, gx, gw))
        assert mine == theirs, dimension


def check_rule(lattice: Lattice, kernel: int) -> None:
    """The taps of every phase, and no others, follow from the rule."""
    of_first, base, of_shift, step = lattice.rule
    shifts = {tap.shift for taps in lattice.taps for tap in taps}
    for first, taps in zip(lattice.firsts, lattice.taps, strict=True):
        for shift in shifts:
            k, rest = divmod(first * of_first + base - shift * of_shift, step)
            found = not rest and 0 <= k < kernel
            assert found == any(tap.shift == shift and tap.k == k for tap in taps)


def test_lattices_read_the_positions_of_the_definition() -> None:
    for dimension in DIMENSIONS[::7]:
        size, kernel, stride, padding, extra, dilation = dimension
        problem = Problem.of(1, 1, 1, (size,), kernel, stride, padding, extra, dilation)
        inside = {(o, k): i for o, k, i in brute_force(dimension)}
        for in_step in (1, 2, 3):
            lattice = Lattice.of(problem, 0).stacked(in_step)
            check_rule(lattice, kernel)
            assert inside == {
                (q * lattice.out_step + first, tap.k): q * lattice.in_step + tap.shift
                for q in range(lattice.count)
                for first, taps in zip(lattice.firsts, lattice.taps, strict=True)
                for tap in taps
                if q * lattice.out_step + first < lattice.size
                and 0 <= q * lattice.in_step + tap.shift < size
            }
        for count in (1, 2):
            gradient = Lattice.of_input_gradient(problem, 0).stacked(count)
            check_rule(gradient, kernel)
            assert inside == {
                (o, tap.k): q * gradient.out_step + first
                for q in range(gradient.count)
                for first, taps in zip(gradient.firsts, gradient.taps, strict=True)
                for tap in taps
                for o in [q * gradient.in_step + tap.shift]
                if 0 <= o < problem.out_size[0] and q * gradient.out_step + first < size
            }
