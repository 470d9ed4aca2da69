"""Layers to try the Hopper kernel on, and what PyTorch computes for them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st

from upconv.planner import Problem
from upconv.planner.sm90_task import forward_task, input_gradient_task

TASKS = {"forward": forward_task, "grad_input": input_gradient_task}
"""What the kernel serves, by direction."""


@st.composite
def problems(draw: st.DrawFn, dimensions: tuple[int, ...] = (1, 2, 2, 3)) -> Problem:
    ndim = draw(st.sampled_from(dimensions))
    some = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * ndim))  # noqa: E731
    stride, dilation = some(1, draw(st.sampled_from([4, 4, 7])) if ndim < 3 else 3), some(1, 3)
    channels_last = ndim == 2 and draw(st.booleans())
    step = 8 if channels_last else 1
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    most = 40 if ndim < 3 else 20
    few = draw(st.booleans())  # output channels: the kernel folds phases into its rows
    channels = [
        draw(st.integers(least // step or 1, end // step)) * step
        for least, end in ((8, most), (1, 12) if few else (8, 136))
    ]
    problem = Problem(
        batch=draw(st.integers(1, 4 if ndim < 3 else 2)),
        in_channels=channels[0] * groups,
        out_channels=(channels[1] if groups == 1 else min(channels[1], 24)) * groups,
        in_size=some(1, 9 if ndim < 3 else 5),
        kernel=some(1, 4),
        stride=stride,
        padding=some(0, 2),
        # PyTorch answers channels_last with another layout where it reaches the stride.
        output_padding=tuple(
            draw(st.integers(0, (s if channels_last else max(s, d)) - 1))
            for s, d in zip(stride, dilation, strict=True)
        ),
        dilation=dilation,
        groups=groups,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        channels_last=channels_last,
        tf32=draw(st.booleans()),
    )
    assume(min(problem.out_size) > 0)
    return problem


def expected(problem: Problem, x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    compute = getattr(torch.nn.functional, f"conv_transpose{problem.ndim}d")
    lists = problem.stride, problem.padding, problem.output_padding
    answer: torch.Tensor = compute(
        *map(torch.from_numpy, (x, w, b)), *lists, problem.groups, problem.dilation
    )
    return answer.numpy()


def expected_grad_input(problem: Problem, gy: np.ndarray, w: np.ndarray) -> np.ndarray:
    x = torch.zeros(problem.batch, problem.in_channels, *problem.in_size, dtype=torch.float64)
    answer: torch.Tensor = torch.ops.aten.convolution_backward(
        torch.from_numpy(gy),
        x,
        torch.from_numpy(w),
        None,
        problem.stride,
        problem.padding,
        problem.dilation,
        True,
        problem.output_padding,
        problem.groups,
        [True, False, False],
    )[0]
    return answer.numpy()


STRIPS = {
    "one box a tile": ("forward", (2, 16, 24, (6, 32), (3, 5))),
    "past the image": ("forward", (1, 16, 24, (17, 36), 3)),
    "two width phases": ("forward", (2, 16, 72, (9, 24), 4, 2, 1)),
    "several images": ("forward", (7, 16, 72, (8, 8), 4, 2, 1)),
    "narrower than a strip": ("forward", (5, 8, 16, (6, 7), 5, 1, 2)),
    "folds": ("forward", (1, 16, 12, (20, 16), 5, 1, 2)),
    "gradient": ("grad_input", (2, 16, 16, (19, 32), 3)),
    "gradient with steps": ("grad_input", (2, 16, 8, (8, 16), 4, 2, 1)),
    "depths and groups": ("grad_input", (1, 32, 32, (3, 6, 24), 3, 1, 1, 0, 1, 2)),
}
"""Layers whose rows may lie in strips, and their direction."""
