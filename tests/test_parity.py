"""Thousands of drawn configurations, forward and all gradients, against PyTorch.

The tolerance, stated once. A result is a sum of n products, computed in an accumulator of at least
float32 and rounded to its dtype. With S the same sum over absolute values,

    |result - exact| <= (2 * eps(dtype) + n * eps(accumulator)) * S

where "exact" is PyTorch's float64 result on the same inputs. Where PyTorch itself is worse than
that, as far from the exact value as twice PyTorch's own largest error is good enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Case, cases
from torch import Tensor
from torch.nn import functional as F

import upconv
from upconv import ops, recording

EXAMPLES = 1000  # for each number of dimensions
THEIRS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
OURS = {1: upconv.conv_transpose1d, 2: upconv.conv_transpose2d, 3: upconv.conv_transpose3d}
NAMES = ("forward", "grad_input", "grad_weight", "grad_bias")

Results = dict[str, Tensor]


def run(function: Callable[..., Tensor], case: Case, tensors: list[Tensor | None]) -> Results:
    """Forward and every gradient, the output's gradient being drawn as well."""
    output = function(*tensors, *case.parameters)
    generator = torch.Generator().manual_seed(case.seed + 1)
    grad_output = torch.randn(output.shape, generator=generator).to(case.dtype)
    wanted = [t for t in tensors if t is not None]
    gradients = torch.autograd.grad(output, wanted, grad_output.to(output.device, output.dtype))
    return dict(zip(NAMES, (output.detach(), *gradients), strict=False))


def exact_and_scale(case: Case, tensors: list[Tensor | None]) -> tuple[Results, Results]:
    """The float64 results, and the same sums over absolute values."""
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    exact = run(THEIRS[case.ndim], case, wide)
    absolute = [None if t is None else t.detach().abs().requires_grad_() for t in wide]
    output = THEIRS[case.ndim](*absolute, *case.parameters)
    generator = torch.Generator().manual_seed(case.seed + 1)
    grad_output = torch.randn(output.shape, generator=generator).to(case.dtype).double().abs()
    gradients = torch.autograd.grad(output, [t for t in absolute if t is not None], grad_output)
    return exact, dict(zip(NAMES, (output.detach(), *gradients), strict=False))


def terms(case: Case, name: str) -> int:
    pixels = (case.batch or 1) * prod(case.size)
    return {
        "forward": case.in_channels // case.groups * prod(case.kernel) + 1,
        "grad_input": case.out_channels // case.groups * prod(case.kernel),
        "grad_weight": pixels,
        "grad_bias": pixels * prod(case.stride) * 8,
    }[name]


def assert_close(case: Case, name: str, ours: Tensor, theirs: Tensor, exact: Tensor, scale: Tensor):
    assert ours.shape == theirs.shape, name
    assert ours.dtype == theirs.dtype, name
    if ours.numel() == 0:
        return
    accumulator = torch.float64 if case.dtype == torch.float64 else torch.float32
    relative = 2 * torch.finfo(case.dtype).eps
    relative += terms(case, name) * torch.finfo(accumulator).eps
    smallest = torch.finfo(case.dtype).smallest_normal
    error = (ours.double() - exact).abs()
    # With AMX PyTorch has NaN for some gradients in 16 bits: then the first limit alone counts.
    their_error = (theirs.double() - exact).abs().max().nan_to_num(0.0)
    allowed = torch.maximum(relative * scale + smallest, 2 * their_error)
    assert bool((error <= allowed).all()), (
        f"{name}: error {error.max():.3g}, PyTorch's {their_error:.3g}, "
        f"allowed {allowed.min():.3g} and more, for {case}"
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(case: Case, kernels: tuple[str | None, ...] = (None, "cpu_fprop")) -> None:
    """By the planner's choice, and by the native kernel wherever it is legal."""
    tensors = list(case.tensors())
    theirs = run(THEIRS[case.ndim], case, tensors)
    exact, scale = exact_and_scale(case, tensors)
    for kernel in kernels:
        with ops.forced(kernel):
            ours = run(OURS[case.ndim], case, tensors)
            with torch.no_grad(), threads(2):
                unrecorded = OURS[case.ndim](*tensors, *case.parameters)
        assert unrecorded.stride() == theirs["forward"].stride()
        assert ours["forward"].stride() == theirs["forward"].stride()
        for name in ours:
            assert_close(case, name, ours[name], theirs[name], exact[name], scale[name])
        assert_close(
            case, "forward", unrecorded, theirs["forward"], exact["forward"], scale["forward"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_drawn_configurations_equal_pytorch(ndim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else calls as small as these would record their gradients by PyTorch's function.
    monkeypatch.setattr(recording, "WORTH_RECORDING_US", 0.0)
    seen = set()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=cases(ndim))
    def drawn(case: Case) -> None:
        seen.add(case)
        check(case)

    # On a busy machine, threads that wait for each other take most of the time; the call that
    # records nothing has two.
    with threads(1):
        drawn()
    assert len(seen) >= 0.95 * EXAMPLES
    assert {case.dtype for case in seen} == set(DTYPES)
    assert {case.batch for case in seen} >= {None, 0, 1, 2}


def test_forcing_runs_the_native_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the half of the tests above that forces it would prove nothing."""
    made = []
    record = ops.plans.record
    monkeypatch.setattr(ops.plans, "record", lambda key: made.append(record(key)) or made[-1])
    with ops.forced("cpu_fprop"):
        upconv.conv_transpose2d(torch.randn(1, 2, 3, 3), torch.randn(2, 2, 3, 3))
    assert [answer[0] for answer in made] == [ops.plans.KERNEL_IDS["cpu_fprop"]]
    assert ops.compiled("cpu")


@given(case=st.integers(1, 3).flatmap(lambda ndim: cases(ndim, (torch.float32,))))
@settings(max_examples=20, derandomize=True, deadline=None, database=None)
def test_the_tolerance_notices_a_wrong_tap(case: Case) -> None:
    """An error of one part in a thousand in one weight is outside of what is allowed."""
    tensors = list(case.tensors())
    exact, scale = exact_and_scale(case, tensors)
    theirs = run(THEIRS[case.ndim], case, tensors)
    if case.batch == 0 or float(exact["forward"].abs().max()) == 0:
        return
    wrong = theirs["forward"] * 1.001
    with pytest.raises(AssertionError):
        assert_close(case, "forward", wrong, theirs["forward"], exact["forward"], scale["forward"])
