"""The mma.sync kernels for the gradients on a GPU: forced, on drawn calls, against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from gpu_checks import check_same, distance, poison
from test_direct_grads import gradient, reference, tensors

from upconv import ops
from upconv.configurations import draw
from upconv.planner import Problem, gather_igrad, gather_wgrad

pytestmark = pytest.mark.gpu

# Relative to the norm: float32 sums of operands rounded to TF32 beforehand, results of 16 bits.
LIMIT = {"float32": 1e-4, "bfloat16": 4e-3, "float16": 6e-4}
KERNELS = {"grad_input": gather_igrad, "grad_weight": gather_wgrad}


@pytest.fixture(autouse=True)
def tf32_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32")


def served(problem: Problem) -> bool:
    machine = ops.plans.cuda_hardware(0)
    answer = KERNELS[problem.direction].consider(replace(problem, tf32=True), machine)
    return hasattr(answer, "params")


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """As the tensor cores see it: float32 to the nearest TF32 number."""
    if tensor.dtype != torch.float32:
        return tensor
    return (tensor.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


def check(problem: Problem) -> None:
    operands = tensors(problem)
    expected = reference(problem, *(rounded(t).double() for t in operands))
    with torch.no_grad(), ops.forced(KERNELS[problem.direction].KERNEL):
        poison(expected.shape, operands[0].dtype)
        torch.full((gather_wgrad.WORKSPACE_BYTES // 4,), float("nan"), device="cuda")
        result = gradient(problem, *operands)
        again = gradient(problem, *operands)
    check_same(result, again)
    assert distance(result, expected) <= LIMIT[problem.dtype], problem


@pytest.mark.parametrize("direction", KERNELS)
@pytest.mark.parametrize("seed", range(4))
def test_drawn_gradients(seed: int, direction: str) -> None:
    compared = 0
    for configuration in islice(draw(800 + seed), 40):
        problem = replace(configuration.problem, channels_last=False, direction=direction)
        if problem.dtype != "float64" and served(problem):
            check(problem)
            compared += 1
    assert compared > 15


LAYERS = {
    "bilinear": Problem.of(2, 5, 5, (64, 64), 16, 8, 4, groups=5),
    "one output": Problem.of(2, 56, 1, (64, 64), 9, 3, 4, 2),
    "groups": Problem.of(2, 32, 64, (33, 62), (3, 5), (2, 3), (1, 2), 0, (2, 1), 4),
    "volume": Problem.of(2, 16, 16, (6, 12, 24), (3, 5, 7), 2, (1, 2, 3), 1, 1, 2),
    "signal": Problem.of(2, 16, 16, (4095,), 4, 2, 1, groups=16),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", LAYERS)
def test_errors_are_no_larger_than_those_of_the_rounding(name: str, dtype: str) -> None:
    """16-bit results against PyTorch's; TF32 against what rounded operands give in float64."""
    for direction, module in KERNELS.items():
        problem = replace(LAYERS[name], dtype=dtype, direction=direction)
        check(problem)
        operands = tensors(problem)
        expected = reference(problem, *(t.double() for t in operands))
        with torch.no_grad(), ops.forced(module.KERNEL):
            ours = distance(gradient(problem, *operands), expected)
        if dtype != "float32":
            assert ours <= 1.1 * distance(reference(problem, *operands), expected)
            continue
        best = reference(problem, *(rounded(t).double() for t in operands))
        assert ours <= 1.05 * distance(best, expected)


@pytest.mark.parametrize("seed", range(2))
def test_float32_that_must_not_be_rounded(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's gradient of drawn layers, and of a long sum: no larger errors than PyTorch's."""
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    drawn = (configuration.problem for configuration in islice(draw(850 + seed), 40))
    long = Problem.of(16, 64, 32, (120, 160), 4, 2, 1)
    compared = 0
    for each in (*drawn, *LAYERS.values(), long):
        problem = replace(each, channels_last=False, direction="grad_weight", tf32=False)
        machine = ops.plans.cuda_hardware(0)
        if problem.dtype != "float32" or not hasattr(
            gather_wgrad.consider(problem, machine), "params"
        ):
            continue
        operands = tensors(problem)
        expected = reference(problem, *(t.double() for t in operands))
        theirs = distance(reference(problem, *operands), expected)
        with torch.no_grad(), ops.forced(gather_wgrad.KERNEL):
            poison(expected.shape, torch.float32)
            torch.full((gather_wgrad.WORKSPACE_BYTES // 4,), float("nan"), device="cuda")
            result = gradient(problem, *operands)
            assert torch.equal(result, gradient(problem, *operands)), problem
        assert distance(result, expected) <= max(1.1 * theirs, 3e-7), problem
        compared += 1
    assert compared > 10


def test_a_tensor_at_an_odd_offset_and_an_expanded_one() -> None:
    problem = Problem.of(2, 6, 6, (9, 32), 5, 2, 2, groups=6, dtype="float16")
    x, w, gy = tensors(problem)
    odd = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    odd_gy = torch.empty(gy.numel() + 1, dtype=gy.dtype, device="cuda")[1:].view(gy.shape).copy_(gy)
    spread = gy[:, :, :1, :1].expand(gy.shape)
    for direction, module in KERNELS.items():
        of = replace(problem, direction=direction)
        for operands in ((odd, w, gy), (x, w, odd_gy), (x, w, spread)):
            expected = reference(of, *(t.double() for t in operands))
            with torch.no_grad(), ops.forced(module.KERNEL):
                assert distance(gradient(of, *operands), expected) <= LIMIT["float16"]
