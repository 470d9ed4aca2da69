"""The kernels for the gradients of depthwise layers on a GPU: forced, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_checks import between_nans, check_same, distance, poison
from test_depthwise_host import LAYERS, drawn
from test_direct_grads import reference, rest_of, tensors

from upconv import ops
from upconv.planner import Problem, depthwise, depthwise_igrad, depthwise_wgrad

pytestmark = pytest.mark.gpu

# Relative to the norm of the result: half a unit of the output's last place is up to 2^-8 of a
# bfloat16 (8 significant bits) and 2^-11 of a float16, and a bias's gradient may be a few numbers
# that all round by as much; float32: the rounding of a few hundred additions.
LIMIT = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
PLANNERS = {"grad_input": depthwise_igrad, "grad_weight": depthwise_wgrad}


def gradients(problem: Problem, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The input's gradient, or the weight's and the bias's."""
    x, w, gy = operands
    if problem.direction == "grad_input":
        return (ops.GRADIENTS["grad_input"](gy, w, x.shape, *rest_of(problem)),)
    return torch.ops.upconv._grad_weight_and_bias(gy, x, w.shape, *rest_of(problem))


def exact(problem: Problem, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    doubles = [each.double() for each in operands]
    sums = doubles[2].sum([0, *range(2, doubles[2].dim())])
    wanted = reference(problem, *doubles)
    return (wanted,) if problem.direction == "grad_input" else (wanted, sums)


def check(problem: Problem, operands: tuple[torch.Tensor, ...]) -> None:
    wanted = exact(problem, *operands)
    with torch.no_grad(), ops.forced(PLANNERS[problem.direction].KERNEL):
        torch.full((depthwise_wgrad.WORKSPACE_BYTES // 4,), float("nan"), device="cuda")
        poison(wanted[0].shape, operands[0].dtype)
        results = gradients(problem, *operands)
        again = gradients(problem, *operands)
    for ours, twice, expected in zip(results, again, wanted, strict=True):
        check_same(ours, twice)
        assert distance(ours, expected) <= LIMIT[problem.dtype], problem


def served(problem: Problem) -> bool:
    return depthwise.legality(problem, ops.plans.cuda_hardware(0)) is None


@pytest.mark.parametrize("seed", range(6))
def test_drawn_gradients(seed: int) -> None:
    torch.manual_seed(seed)
    source, compared = drawn(900 + seed), 0
    while compared < 40:
        problem = next(source)
        if served(problem):
            check(problem, tensors(problem))
            compared += 1


@pytest.mark.parametrize("seed", range(2))
def test_any_division(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the one that the planner takes."""
    source, compared = drawn(950 + seed), 0
    while compared < 20:
        problem = next(source)
        if not served(problem):
            continue
        planner = PLANNERS[problem.direction]
        ways = list(planner.divisions(problem, ops.plans.cuda_hardware(0)))
        for way in {ways[0], ways[len(ways) // 2], ways[-1]}:
            made = [ops.plans.KERNEL_IDS[planner.KERNEL], *planner.record(way)]
            with monkeypatch.context() as patch:
                patch.setattr(ops.plans, "record", lambda key, made=made: made)
                check(replace(problem, bias=True), tensors(problem))
        compared += 1


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, dtype: str) -> None:
    for direction in PLANNERS:
        problem = replace(LAYERS[name], dtype=dtype, direction=direction)
        check(problem, tensors(problem))


FULL = {
    "bilinear": Problem.of(2, 21, 21, (64, 64), 16, 8, 4, groups=21),
    "32 times": Problem.of(2, 21, 21, (16, 16), 64, 32, 16, groups=21),
    "many channels": Problem.of(8, 256, 256, (14, 14), 4, 2, 1, groups=256),
    "odd rows": Problem.of(4, 64, 64, (55, 57), 3, 2, 1, groups=64),
    "signal": Problem.of(8, 128, 128, (4096,), 4, 2, 1, groups=128),
    "volume": Problem.of(2, 32, 32, (9, 16, 32), 4, 2, 1, groups=32),
    "wide": Problem.of(1, 3, 3, (40, 2000), 4, 2, 1, groups=3),
}


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("name", FULL)
def test_errors_are_no_larger_than_pytorchs(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    for direction, planner in PLANNERS.items():
        problem = replace(FULL[name], dtype=dtype, direction=direction)
        operands = tensors(problem)
        check(problem, operands)
        wanted = exact(problem, *operands)[0]
        with torch.no_grad(), ops.forced(planner.KERNEL):
            ours = distance(gradients(problem, *operands)[0], wanted)
        theirs = distance(reference(problem, *operands), wanted)
        assert ours <= max(1.1 * theirs, 3e-7), problem


@pytest.mark.parametrize("dtype", LIMIT)
def test_tensors_at_odd_offsets_between_nans_and_expanded_ones(dtype: str) -> None:
    for size, kernel, stride, padding in (((9, 32), 4, 2, 1), ((33,), 3, 2, 1), ((6, 8), 16, 8, 4)):
        layer = Problem.of(3, 6, 6, size, kernel, stride, padding, groups=6, dtype=dtype)
        x, w, gy = tensors(layer)
        odd_x, odd_w, odd_gy = (
            between_nans((each.numel() + 1,), each.dtype)[1:].view(each.shape).copy_(each)
            for each in (x, w, gy)
        )
        spread = gy[(slice(None), slice(None), *[slice(0, 1)] * len(size))].expand(gy.shape)
        for direction in PLANNERS:
            problem = replace(layer, direction=direction)
            for operands in ((odd_x, w, gy), (x, odd_w, odd_gy), (x, w, spread)):
                check(problem, operands)


def test_a_tensor_of_more_than_2_31_elements() -> None:
    problem = Problem.of(1, 2100, 2100, (512, 512), 2, 2, groups=2100, dtype="bfloat16")
    x, w, gy = tensors(problem)
    assert gy.numel() > 1 << 31
    with torch.no_grad(), ops.forced(depthwise_igrad.KERNEL):
        gx = ops.GRADIENTS["grad_input"](gy, w, x.shape, *rest_of(problem))
    part = [slice(2090, 2100)]
    blocks = gy[:, part[0]].double().view(1, 10, 512, 2, 512, 2)
    wanted = torch.einsum("nchywx,cyx->nchw", blocks, w[part[0], 0].double())
    assert distance(gx[:, part[0]], wanted) <= LIMIT["bfloat16"]
    with torch.no_grad(), ops.forced(depthwise_wgrad.KERNEL):
        gw, gb = torch.ops.upconv._grad_weight_and_bias(gy, x, w.shape, *rest_of(problem))
    wanted = torch.einsum("nchywx,nchw->cyx", blocks, x[:, part[0]].double())
    assert distance(gw[part[0], 0], wanted) <= LIMIT["bfloat16"]
    assert distance(gb[part[0]], gy[0, part[0]].double().sum([1, 2])) <= LIMIT["bfloat16"]
