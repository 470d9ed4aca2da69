"""The CUDA-core kernels for the gradients on a GPU: forced, on drawn calls, against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from gpu_checks import check_same, distance, poison

from upconv import ops
from upconv.configurations import draw
from upconv.planner import Problem, direct_igrad, direct_wgrad

pytestmark = pytest.mark.gpu

# Relative to the norm of the result: half a unit of the output's last place for 16-bit types, and
# the rounding of a few hundred additions for the others.
LIMIT = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 3e-3, "float16": 5e-4}
KERNELS = {"grad_input": direct_igrad, "grad_weight": direct_wgrad}


def tensors(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight and grad_output."""
    dtype = getattr(torch, problem.dtype)
    each = problem.out_channels // problem.groups
    shapes = (
        (problem.batch, problem.in_channels, *problem.in_size),
        (problem.in_channels, each, *problem.kernel),
        (problem.batch, problem.out_channels, *problem.out_size),
    )
    x, w, gy = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    return x, w, gy


def rest_of(problem: Problem) -> tuple[object, ...]:
    lists = (problem.stride, problem.padding, problem.output_padding)
    return (*lists, problem.groups, problem.dilation)


def gradient(problem: Problem, *operands: torch.Tensor) -> torch.Tensor:
    x, w, gy = operands
    other, of = (x, w) if problem.direction == "grad_weight" else (w, x)
    result = ops.GRADIENTS[problem.direction](gy, other, of.shape, *rest_of(problem))
    assert isinstance(result, torch.Tensor)
    return result


def reference(problem: Problem, *operands: torch.Tensor) -> torch.Tensor:
    x, w, gy = operands
    other, of = (x, w) if problem.direction == "grad_weight" else (w, x)
    result = ops._aten_gradient(problem.direction, gy, other, of.shape, *rest_of(problem))
    assert isinstance(result, torch.Tensor)
    return result


def check(problem: Problem) -> None:
    operands = tensors(problem)
    expected = reference(problem, *(t.double() for t in operands))
    with torch.no_grad(), ops.forced(KERNELS[problem.direction].KERNEL):
        poison(expected.shape, operands[0].dtype)
        torch.full((direct_wgrad.WORKSPACE_BYTES // 4,), float("nan"), device="cuda")
        result = gradient(problem, *operands)
        again = gradient(problem, *operands)
    check_same(result, again)
    assert distance(result, expected) <= LIMIT[problem.dtype], problem


@pytest.mark.parametrize("seed", range(5))
def test_drawn_weight_gradients(seed: int) -> None:
    for configuration in islice(draw(300 + seed), 40):
        problem = replace(configuration.problem, channels_last=False, direction="grad_weight")
        check(problem)


@pytest.mark.parametrize("seed", range(5))
def test_drawn_input_gradients_of_depthwise_layers(seed: int) -> None:
    served = 0
    for configuration in islice(draw(400 + seed), 60):
        drawn = replace(configuration.problem, channels_last=False, direction="grad_input")
        groups = drawn.in_channels
        problem = replace(drawn, groups=groups, out_channels=groups * (1 + seed % 2))
        if direct_igrad.legality(problem, ops.plans.cuda_hardware(0)) is None:
            check(problem)
            served += 1
    assert served > 20


LAYERS = {
    "bilinear": Problem.of(2, 5, 5, (64, 64), 16, 8, 4, groups=5),
    "depthwise": Problem.of(4, 32, 32, (56, 56), 3, 1, 1, groups=32),
    "one output": Problem.of(2, 56, 1, (64, 64), 9, 3, 4, 2),
    "signal": Problem.of(2, 16, 16, (4096,), 4, 2, 1, groups=16),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", LAYERS)
def test_errors_are_no_larger_than_pytorchs(name: str, dtype: str) -> None:
    for direction, module in KERNELS.items():
        problem = replace(LAYERS[name], dtype=dtype, direction=direction)
        if module.legality(problem, ops.plans.cuda_hardware(0)) is not None:
            continue
        operands = tensors(problem)
        expected = reference(problem, *(t.double() for t in operands))
        with torch.no_grad(), ops.forced(module.KERNEL):
            ours = distance(gradient(problem, *operands), expected)
        assert ours <= 1.1 * distance(reference(problem, *operands), expected)


def test_a_tensor_at_an_odd_offset_and_an_expanded_one() -> None:
    problem = Problem.of(2, 6, 6, (9, 33), 5, 2, 2, groups=6, dtype="float16")
    x, w, gy = tensors(problem)
    odd = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    spread = gy[:, :, :1, :1].expand(gy.shape)
    for direction, module in KERNELS.items():
        of = replace(problem, direction=direction)
        for operands in ((odd, w, gy), (x, w, spread)):
            expected = reference(of, *(t.double() for t in operands))
            with torch.no_grad(), ops.forced(module.KERNEL):
                assert distance(gradient(of, *operands), expected) <= LIMIT["float16"]
