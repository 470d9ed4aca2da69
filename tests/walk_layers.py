"""Drawn layers for the Hopper kernel that walks, small ones for a CPU and larger ones for a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import assume
from hypothesis import strategies as st

from upconv.planner import H200, Candidate, Problem, sm90_walk

DIRECTIONS = ("forward", "grad_input")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Most:
    batch: int
    channels: int
    rows: int
    """Of an image or a volume; a third of them of its depth."""
    vectors: int
    """Of 16 bytes, in a row of what the kernel reads."""


@st.composite
def walk_problems(draw: st.DrawFn, most: Most, directions: tuple[str, ...]) -> Problem:
    ndim, direction = draw(st.sampled_from([1, 2, 2, 3])), draw(st.sampled_from(directions))
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    walk, taps = draw(st.sampled_from([(1, 3), (3, 3), (3, 3), (3, 7)]))
    dtype, back = draw(st.sampled_from(DTYPES)), direction == "grad_input"
    # Planes of the walk come one by one, and so do taps in a row.
    dilation = (1, draw(st.sampled_from([1, 1, 2])), 1) if ndim == 3 else 1
    padding = [number(0, 2) for _ in range(ndim)]
    # Rows of what is read are whole vectors.
    width = number(1, most.vectors) * (4 if dtype == "float32" else 8)
    if back:
        width += 2 * padding[-1] - (taps - 1)
    assume(width > 0)
    problem = Problem.of(
        number(1, most.batch),
        number(8, most.channels),
        number(8, most.channels),
        (*[number(1, most.rows if ndim == 2 else most.rows // 3) for _ in range(ndim - 1)], width),
        (walk, taps) if ndim == 2 else (walk, number(1, 4), taps)[-ndim:],
        1,
        tuple(padding),
        0,
        dilation,
        bias=draw(st.booleans()),
        dtype=dtype,
        tf32=True,
        direction=direction,
    )
    assume(min(problem.out_size) > 0)
    assume(isinstance(sm90_walk.consider(problem, H200), Candidate))
    return problem
