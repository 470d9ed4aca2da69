"""The public functions: PyTorch's signature, and the routes that make repeated calls cheap."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import upconv
from upconv import functional, ops, plans, recording
from upconv.planner import H200, Candidate, Problem, make_plan

PAIRS = [
    (upconv.conv_transpose1d, F.conv_transpose1d, 1),
    (upconv.conv_transpose2d, F.conv_transpose2d, 2),
    (upconv.conv_transpose3d, F.conv_transpose3d, 3),
]
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _no_routes() -> None:
    ops.clear_plans()


def problem(ndim: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, *[5] * ndim), torch.randn(4, 3, *[3] * ndim), torch.randn(6)


@pytest.mark.parametrize(("ours", "theirs", "ndim"), PAIRS)
def test_positional_keyword_and_default_arguments(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], ndim: int
) -> None:
    x, w, b = problem(ndim)
    calls = (
        lambda f: f(x, w),
        lambda f: f(x, w, b[:3]),
        lambda f: f(x, w, b, 2, 1, 1, 2, 1),
        lambda f: f(x, w, b, (2,) * ndim, (1,) * ndim, (1,) * ndim, 2, (1,) * ndim),
        lambda f: f(input=x, weight=w, bias=b, groups=2, dilation=2),
        lambda f: f(x, w, None, stride=[3] * ndim, output_padding=2),
        lambda f: f(x, w, padding=torch.Size([1] * ndim)),
    )
    for call in calls:
        for _ in range(3):  # first call, then by the route
            torch.testing.assert_close(call(ours), call(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("ours", "theirs", "ndim"), PAIRS)
def test_signature_is_pytorchs(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], ndim: int
) -> None:
    written = (theirs.__doc__ or "").split("(", 1)[1].split(")", 1)[0]
    names = [part.split("=")[0].strip() for part in written.split(",")]
    parameters = inspect.signature(ours).parameters
    assert list(parameters) == names
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    assert defaults == {
        "bias": None,
        "stride": 1,
        "padding": 0,
        "output_padding": 0,
        "groups": 1,
        "dilation": 1,
    }
    assert ours.__name__ == theirs.__name__
    assert ours.__module__ == "upconv.functional"


@pytest.mark.parametrize("kernel", ["cpu_fprop", "aten"])
def test_a_known_call_is_not_planned_again(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = problem()
    with ops.forced(kernel):
        expected = upconv.conv_transpose2d(x, w, b, 2, groups=2)
        monkeypatch.setattr(functional, "_long_way", lambda *given: pytest.fail("planned again"))
        assert torch.equal(upconv.conv_transpose2d(x, w, b, 2, groups=2), expected)
        with pytest.raises(pytest.fail.Exception):
            upconv.conv_transpose2d(x, w, b, 3, groups=2)


def test_forcing_and_releasing_a_kernel_takes_effect_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    plan_of = plans.plan_of

    def spy(key: list[int]) -> object:
        plan = plan_of(key)
        asked.append(plan.kernel if plan else "none")
        return plan

    monkeypatch.setattr(plans, "plan_of", spy)
    x, w, _ = problem()
    for kernel in ("cpu_fprop", "aten", "cpu_fprop"):
        asked.clear()
        with ops.forced(kernel):
            upconv.conv_transpose2d(x, w)
        assert set(asked) == {kernel}


def test_short_recorded_calls_take_pytorchs_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording ours costs more than a tiny kernel can win; a large one is worth it."""
    x, w, _ = problem()
    w.requires_grad_()
    with ops.forced("cpu_fprop"):
        for limit, name in ((1e9, "Convolution"), (0.0, "ConvTransposeFunction")):
            monkeypatch.setattr(recording, "WORTH_RECORDING_US", limit)
            ops.clear_plans()
            for _ in range(2):
                y = upconv.conv_transpose2d(x, w)
                with torch.no_grad():
                    torch.testing.assert_close(upconv.conv_transpose2d(x, w), y)
            assert type(y.grad_fn).__name__.startswith(name)


def test_routes_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "MOST_ROUTES", 8)
    w = torch.randn(2, 2, 3)
    for length in range(1, 30):
        upconv.conv_transpose1d(torch.randn(1, 2, length), w)
        assert len(functional._routes) <= 8


def test_autocast_takes_effect_on_a_known_call() -> None:
    x, w, _ = problem()
    for kernel in ("cpu_fprop", "aten"):
        with ops.forced(kernel):
            assert upconv.conv_transpose2d(x, w).dtype == torch.float32
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert upconv.conv_transpose2d(x, w).dtype == torch.bfloat16


def test_tensor_subclasses_and_function_modes() -> None:
    class Named(torch.Tensor):
        pass

    x, w, _ = problem()
    for _ in range(2):
        result = upconv.conv_transpose2d(x.as_subclass(Named), w)
        assert type(result) is Named
        torch.testing.assert_close(result.as_subclass(Tensor), F.conv_transpose2d(x, w))
    with torch.device("cpu"):
        torch.testing.assert_close(upconv.conv_transpose2d(x, w), F.conv_transpose2d(x, w))


def test_subclasses_are_asked_about_pytorchs_function() -> None:
    """They know that one, and not ours; whether a call of these sizes came before or not."""

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return "handled"

    seen: list[object] = []
    x, w, _ = problem()
    functional._routes.clear()
    for _ in range(2):
        assert upconv.conv_transpose2d(x.as_subclass(Own), w) == "handled"
        upconv.conv_transpose2d(x, w)  # from now on the route is known
    assert seen == [F.conv_transpose2d] * 2


def test_modes_see_the_function_that_was_called() -> None:
    class Log(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[object] = []
    x, w, _ = problem()
    for _ in range(2):
        with Log():
            result = upconv.conv_transpose2d(x, w)
        torch.testing.assert_close(result, F.conv_transpose2d(x, w))
    assert seen == [upconv.conv_transpose2d] * 2


def test_jagged_tensors_are_pytorchs() -> None:
    parts = [torch.randn(3, 8, 6), torch.randn(4, 8, 6)]
    x, w = torch.nested.nested_tensor(parts, layout=torch.jagged), torch.randn(8, 8, 3)
    for _ in range(2):
        torch.testing.assert_close(
            upconv.conv_transpose1d(x, w).values(), F.conv_transpose1d(x, w).values()
        )


def test_dilation_of_zero_where_the_kernel_is_one() -> None:
    x, w = torch.randn(1, 4, 2), torch.randn(4, 2, 1)
    rest = (None, 3, 2, 2, 2, 0)
    for _ in range(2):
        torch.testing.assert_close(
            upconv.conv_transpose1d(x, w, *rest), F.conv_transpose1d(x, w, *rest)
        )


def test_fx_records_the_function() -> None:
    class Up(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return upconv.conv_transpose2d(x, w, stride=2)

    graph = fx.symbolic_trace(Up())
    assert upconv.conv_transpose2d in [node.target for node in graph.graph.nodes]
    x, w, _ = problem()
    torch.testing.assert_close(graph(x, w), F.conv_transpose2d(x, w, stride=2))


def _in_new_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_touches_neither_cuda_nor_a_compiler() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import upconv
new = set(sys.modules) - before
assert not torch.cuda.is_initialized()
heavy = [m for m in new if m.startswith(("torch.utils.cpp_extension", "torch._inductor",
         "torch._dynamo", "sympy", "rich", "matplotlib", "numpy", "setuptools"))]
assert not heavy, heavy
assert not upconv.functional._routes
assert torch.ops.upconv.conv_transpose2d.default
print("fine")
"""
    assert _in_new_process(code, PATH="/nonexistent", CUDA_VISIBLE_DEVICES="") == "fine"


def test_without_a_library_calls_run_on_pytorch_and_stay_cheap() -> None:
    """One failed attempt to load, then the route by PyTorch's function."""
    code = """
import torch, upconv
from upconv import jit, ops, functional
tries = []
class Failed: ok = False
jit.load = lambda kind: tries.append(kind) or Failed()
x, w = torch.randn(1, 4, 5, 5), torch.randn(4, 6, 3, 3)
with ops.forced("cpu_fprop"):
    for size in (5, 5, 6, 7):
        x = torch.randn(1, 4, size, size)
        expected = torch.conv_transpose2d(x, w)
        assert torch.equal(upconv.conv_transpose2d(x, w), expected)
        assert torch.equal(torch.ops.upconv.conv_transpose2d(x, w), expected)
    assert set(functional._routes.values()) == {None}
assert tries == ["cpu"], tries
print("fine")
"""
    assert _in_new_process(code) == "fine"


@pytest.mark.parametrize("first", ["recorded", "not recorded"])
@pytest.mark.parametrize("side", [4, 256])
def test_layers_of_pytorchs_take_our_gradients_where_they_are_worth_it(
    monkeypatch: pytest.MonkeyPatch, side: int, first: str
) -> None:
    """The planner's answers are those of a GPU, the tensors small ones of the CPU."""
    problem = Problem.of(64, 64, 128, (side, side), 3, tf32=True)
    plan = replace(make_plan(problem, H200), chosen=Candidate("aten", 1e3))
    monkeypatch.setattr(ops, "planned", lambda *_: plan)
    monkeypatch.setattr(ops, "serve", lambda kind: kind == "cuda")
    x, w = torch.randn(1, 3, 5, 5), torch.randn(3, 2, 3, 3)
    name = "ConvTransposeFunctionBackward" if side == 256 else "ConvolutionBackward0"
    for recorded in (first == "recorded", True, False, True):
        y = upconv.conv_transpose2d(x.requires_grad_(recorded), w)
        torch.testing.assert_close(y, F.conv_transpose2d(x, w))
        assert type(y.grad_fn).__name__ == (name if recorded else "NoneType")
