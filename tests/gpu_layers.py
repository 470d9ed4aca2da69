"""A planner's problem on the GPU: its tensors, by our operators and in float64."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_checks import between_nans, check_same, distance, poison, serving

import upconv
from upconv import ops, plans
from upconv.planner import Problem

OURS = (upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)
PYTORCHS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What is read, the weight, and the bias where the layer has one."""


def tensors(problem: Problem, seed: int) -> Tensors:
    torch.manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    back = problem.direction == "grad_input"
    channels, size = (
        (problem.out_channels, problem.out_size) if back else (problem.in_channels, problem.in_size)
    )
    x = between_nans((problem.batch, channels, *size), dtype)
    each = problem.out_channels // problem.groups
    w = torch.randn(problem.in_channels, each, *problem.kernel, device="cuda")
    bias = torch.randn(problem.out_channels, device="cuda").to(dtype) if problem.bias else None
    return x, w.to(dtype), bias


def forward_steps(problem: Problem) -> tuple[Any, ...]:
    """What follows the bias in a forward call."""
    steps = (problem.stride, problem.padding, problem.output_padding)
    return (*steps, problem.groups, problem.dilation)


def backward_steps(problem: Problem) -> tuple[Any, ...]:
    """What follows the weight in a call for the input's gradient."""
    shape = (problem.batch, problem.in_channels, *problem.in_size)
    return (shape, *forward_steps(problem))


def result_of(
    problem: Problem, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if problem.direction == "forward":
        return OURS[problem.ndim - 1](x, w, bias, *forward_steps(problem))
    return ops.GRADIENTS["grad_input"](x, w, *backward_steps(problem))


def expected_of(
    problem: Problem, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """By PyTorch, in float64."""
    if problem.direction == "forward":
        wide = None if bias is None else bias.double()
        return PYTORCHS[problem.ndim - 1](x.double(), w.double(), wide, *forward_steps(problem))
    return ops._aten_gradient("grad_input", x.double(), w.double(), *backward_steps(problem))


def check_forced(problem: Problem, kernel: str, seed: int, limit: float) -> None:
    """The kernel, asked for by name, serves, equals float64, and says the same twice."""
    x, w, bias = tensors(problem, seed)
    expected = expected_of(problem, x, w, bias)
    with torch.no_grad(), ops.forced(kernel):
        if problem.direction == "forward":
            assert serving(problem.ndim, x, w, bias, *forward_steps(problem)) == kernel
        poison(expected.shape, x.dtype)
        result, again = (result_of(problem, x, w, bias) for _ in range(2))
    check_same(result, again)
    assert distance(result, expected) <= limit


def check_tilings(
    problem: Problem, kernel: str, records: Iterable[tuple[int, ...]], seed: int, limit: float
) -> None:
    """Each of the kernel's plans equals float64, whichever the planner would choose."""
    x, w, bias = tensors(problem, seed)
    expected = expected_of(problem, x, w, bias)
    for record in records:
        poison(expected.shape, x.dtype)
        with plans.given(kernel, record), torch.no_grad():
            assert distance(result_of(problem, x, w, bias), expected) <= limit, record
