"""The Hopper kernel as it computes grad_input at stride 1: the same kernel, the weight mirrored."""

from __future__ import annotations

import numpy as np
import sm90_emulator as emulator
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from upconv.planner import H200, Candidate, Problem, make_plan, sm90


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    pair = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * 2))  # noqa: E731
    kernel, dilation = pair(1, 4), pair(1, 3)
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    channels_last = draw(st.booleans())
    step = 8 if channels_last else 1
    problem = Problem(
        batch=draw(st.integers(1, 3)),
        in_channels=draw(st.integers(8 // step, 72 // step)) * step,
        out_channels=draw(st.integers(8 // step, 40 // step)) * step,
        in_size=pair(1, 9),
        kernel=kernel,
        stride=(1, 1),
        padding=tuple(draw(st.integers(0, r)) for r in reach),
        output_padding=(0, 0),
        dilation=dilation,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        channels_last=channels_last,
        tf32=True,
        direction="grad_input",
    )
    assume(min(problem.out_size) > 0)
    return problem


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems())
def test_the_emulated_kernel_computes_the_gradient(problem: Problem) -> None:
    rng = np.random.default_rng(0)
    gy = rng.standard_normal((problem.batch, problem.out_channels, *problem.out_size))
    w = rng.standard_normal((problem.in_channels, problem.out_channels, *problem.kernel))
    answer = sm90.consider(problem, H200)
    assert isinstance(answer, Candidate), answer
    gx = emulator.run(answer.params, gy, w, np.zeros(problem.in_channels))
    expected = torch.nn.functional.conv2d(
        torch.from_numpy(gy), torch.from_numpy(w), None, 1, problem.padding, problem.dilation
    )
    np.testing.assert_allclose(gx.reshape(expected.shape), expected.numpy(), rtol=1e-10, atol=1e-10)


def test_kernels_for_other_directions_are_refused_by_name() -> None:
    plan = make_plan(Problem.of(2, 32, 32, (20, 20), 3, direction="grad_weight"), H200)
    reasons = {refusal.kernel: refusal.reason for refusal in plan.refused}
    assert reasons["sm90_wgmma_fprop"] == "computes forward and grad_input, not grad_weight"
    assert reasons["cpu_fprop"] == "computes forward, not grad_weight"
