"""The kernel for few output channels on a CUDA GPU, forced wherever it is legal."""

from __future__ import annotations

from math import prod

import pytest
import torch
from gpu_checks import allocations, check_same, poison, serving
from hypothesis import Phase, assume, given, settings
from test_mma import LIMIT, OURS, THEIRS, _ampere, calls, error, limit_for, tensors

from upconv import ops
from upconv.cases import CASES
from upconv.planner import H200, make_plan
from upconv.planner.overlap import KERNEL

pytestmark = pytest.mark.gpu

__all__ = ["_ampere"]  # sets the precision of float32 back after each test


FEW_OUTPUTS = calls(
    cin=(1, 100),
    cout=(1, 4),
    sizes=(4000, 150, 20),
    kernels=(16, 9, 4),
    most_dilation=2,
    groups=(1, 1, 2, 3),
)


def test_the_forced_kernel_equals_pytorch() -> None:
    served = []

    @settings(max_examples=400, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(FEW_OUTPUTS)
    def drawn(c: dict[str, object]) -> None:
        x, w, b = tensors(c)
        rest = (c["stride"], c["padding"], c["output_padding"], c["groups"], c["dilation"])
        ndim = w.dim() - 2
        try:
            shape = THEIRS[ndim - 1](x.to("meta"), w.to("meta"), None, *rest).shape  # type: ignore
        except RuntimeError:
            assume(False)
        assume(min(shape) > 0 and prod(shape) < 2**25)
        with torch.no_grad(), ops.forced(KERNEL):
            assume(serving(ndim, x, w, b, *rest) == KERNEL)
            poison(shape, x.dtype)
            y = OURS[ndim - 1](x, w, b, *rest)  # type: ignore[arg-type]
            again = OURS[ndim - 1](x, w, b, *rest)  # type: ignore[arg-type]
        check_same(y, again)
        assert error(y, x, w, b, *rest) <= limit_for(c["kind"], y)
        served.append(c["kind"])

    drawn()
    assert len(served) > 150
    assert set(served) == set(LIMIT)


def test_nothing_is_allocated_beside_the_output() -> None:
    case = next(case for case in CASES if case.name == "fsrcnn")
    problem = case.problem(tf32=True)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    x = torch.randn(problem.batch, problem.in_channels, *problem.in_size, device="cuda")
    w = torch.randn(problem.in_channels, problem.out_channels, *problem.kernel, device="cuda")
    rest = (None, problem.stride, problem.padding, problem.output_padding)
    with torch.no_grad(), ops.forced(KERNEL):
        assert serving(2, x, w, *rest) == KERNEL
        OURS[1](x, w, *rest)
        with allocations() as taken:
            y = OURS[1](x, w, *rest)
    assert taken == [1, y.numel() * y.element_size()]


def test_it_is_chosen_for_super_resolution() -> None:
    case = next(case for case in CASES if case.name == "fsrcnn")
    for dtype, tf32 in (("float32", True), ("bfloat16", False)):
        assert make_plan(case.problem(dtype=dtype, tf32=tf32), H200).kernel == KERNEL
