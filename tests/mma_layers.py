"""Layers that the mma.sync kernel can compute, in both directions: as a planner's problems."""

from __future__ import annotations

from math import prod

from hypothesis import assume
from hypothesis import strategies as st

from upconv.planner import Problem

DTYPES = (("float32", True), ("float32", False), ("bfloat16", True), ("float16", True))


@st.composite
def problems(draw: st.DrawFn, largest: int = 300) -> Problem:
    ndim = draw(st.integers(1, 3))
    each = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * ndim))  # noqa: E731
    stride, dilation = each(1, 4), each(1, 3)
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    dtype, tf32 = draw(st.sampled_from(DTYPES))
    size = tuple(draw(st.integers(1, (40, 9, 5)[ndim - 1])) for _ in range(ndim))
    problem = Problem(
        batch=draw(st.integers(1, 3)),
        in_channels=groups * draw(st.integers(4, 40)),
        out_channels=groups * draw(st.integers(4, 90)),
        in_size=size,
        kernel=each(1, 4 if ndim < 3 else 3),
        stride=stride,
        padding=each(0, 2),
        output_padding=tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        ),
        dilation=dilation,
        groups=groups,
        dtype=dtype,
        tf32=tf32,
        direction=draw(st.sampled_from(["forward", "forward", "grad_input"])),
    )
    assume(min(problem.out_size) > 0)
    assume(prod(problem.out_size) * problem.out_channels <= largest * 100)
    return problem
