"""Drawn layers for the weight's gradient on Hopper, any plan of them, and what PyTorch computes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st

from upconv.planner import H200, Problem, sm90_wgrad, sm90_wgrad_bias


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ndim = draw(st.sampled_from([1, 2, 2, 3]))
    each = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * ndim))  # noqa: E731
    stride, dilation = each(1, 3), each(1, 3)
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    width = draw(st.one_of(st.integers(1, 36), st.sampled_from([8, 16, 32])))
    problem = Problem(
        batch=draw(st.integers(1, 3)),
        in_channels=draw(st.integers(8, 70 // groups)) * groups,
        out_channels=draw(st.integers(8, 70 // groups)) * groups,
        in_size=(*each(1, 4)[1:], width),
        kernel=(*each(1, 3)[1:], draw(st.integers(1, 7))),
        stride=stride,
        padding=draw(st.sampled_from([(0,) * ndim, each(0, 3)])),
        output_padding=tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        ),
        dilation=dilation,
        groups=groups,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        tf32=True,
        direction="grad_weight",
    )
    assume(min(problem.out_size) > 0)
    return problem


@st.composite
def box_problems(draw: st.DrawFn) -> Problem:
    """Layers whose grad_output the TMA can bring, in one way or another."""
    ndim = draw(st.sampled_from([1, 2, 2, 3]))
    each = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * ndim))  # noqa: E731
    stride = draw(st.sampled_from([1, 1, 2]))
    kernel = (*each(1, 3)[1:], draw(st.integers(1, 5)))
    padding = draw(st.sampled_from([(0,) * ndim, (0,) * ndim, each(0, 1)]))
    problem = Problem(
        batch=draw(st.integers(1, 9)),
        in_channels=draw(st.integers(8, 70)),
        out_channels=draw(st.sampled_from([16, 24, 32, 64, 64])),
        in_size=(*each(1, 3)[1:], draw(st.sampled_from([8, 16, 24, 32, 64]))),
        kernel=kernel,
        stride=(*each(1, 2)[1:], stride),
        padding=tuple(min(p, k - 1) for p, k in zip(padding, kernel, strict=True)),
        output_padding=(0,) * ndim,
        dilation=(*each(1, 2)[1:], 1),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "bfloat16"])),
        tf32=True,
        direction="grad_weight",
    )
    assume(min(problem.out_size) > 0)
    return problem


@st.composite
def odd_problems(draw: st.DrawFn, bias: bool = False) -> Problem:
    """16-bit layers whose rows of grad_output have an odd number of elements.

    With `bias` many of them are such that it can be added up on the way.
    """
    ndim = draw(st.sampled_from([1, 2, 2, 3]))
    each = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * ndim))  # noqa: E731
    stride = (*each(1, 3)[1:], draw(st.integers(1, 2)))
    kernel = (*each(1, 3)[1:], draw(st.integers(1, 7)))
    dilation = (*each(1, 2)[1:], draw(st.integers(1, 3)))
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    width = draw(st.one_of(st.integers(1, 44), st.sampled_from([16, 32, 64])))
    if bias:
        width, stride, dilation = width // 8 * 8 + 8, (*stride[:-1], 2), (1,) * ndim
        reach = [k // 2 for k in kernel]
    problem = Problem(
        batch=draw(st.integers(1, 5)),
        in_channels=draw(st.integers(8, 70)),
        out_channels=draw(st.sampled_from([8, 16, 24, 32, 40, 64, 64, 72, 128])),
        in_size=(*each(1, 4)[1:], width),
        kernel=kernel,
        stride=stride,
        padding=tuple(draw(st.integers(0, most)) for most in reach),
        output_padding=tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        ),
        dilation=dilation,
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        tf32=True,
        direction="grad_weight",
    )
    assume(min(problem.out_size) > 0 and problem.out_size[-1] % 2 == 1)
    return problem


def any_plan(
    problem: Problem,
    multiprocessors: int,
    rng: Random,
    boxes: bool = False,
    bias: bool = False,
    odd: bool = False,
) -> tuple[int, ...]:
    """A plan that the planner may choose, not the cheapest alone: every kind is as likely.

    With `boxes` one in which the TMA brings grad_output, with `bias` one that adds it up as well,
    with `odd` one for rows that begin anywhere.
    """
    deep = problem.in_three()
    plans = list(sm90_wgrad.options(deep, replace(H200, multiprocessors=multiprocessors)))
    plans = [plan for plan in plans if plan[2].boxes or not boxes]
    plans = [plan for plan in plans if plan[0].odd or not odd]
    plans = [plan for plan in plans if not bias or sm90_wgrad_bias.sums(deep, *plan[:3])]
    assume(plans)
    kinds = [
        (str(form), chunk.boxes, chunk.flat, chunk.classes, chunk.together, chunk.slab)
        for form, _, chunk, _ in plans
    ]
    kind = rng.choice(sorted(set(kinds)))
    plan = rng.choice([plan for plan, each in zip(plans, kinds, strict=True) if each == kind])
    sums = sm90_wgrad_bias.sums(deep, *plan[:3]) if bias else None
    return sm90_wgrad.record(deep, *plan, sums)


def expected(problem: Problem, x: np.ndarray, gy: np.ndarray) -> np.ndarray:
    columns = problem.out_channels // problem.groups
    weight = torch.zeros(problem.in_channels, columns, *problem.kernel).double()
    rest = (problem.stride, problem.padding, problem.dilation, True, problem.output_padding)
    _, result, _ = torch.ops.aten.convolution_backward(
        torch.from_numpy(gy),
        torch.from_numpy(x),
        weight,
        None,
        *rest,
        problem.groups,
        [False, True, False],
    )
    return np.asarray(result)
