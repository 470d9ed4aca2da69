"""What the compiled side is answered: records, and the libraries that they need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import upconv
from upconv import libraries, plans
from upconv.planner import cpu

KINDS = {"float16": "cuda_fp16", "float32": "cuda_strict", "bfloat16": "cuda"}


def key_of(dtype: str, device: str = "cuda") -> list[int]:
    """Of a plain 2-D layer, without TF32."""
    head = dict.fromkeys(plans.KEY_HEADER, 1) | {
        "device_kind": plans.DEVICE_KINDS.index(device),
        "dtype": plans.DTYPES.index(dtype),
        "tf32": 0,
        "ndim": 2,
        "direction": 0,
    }
    lists = {"in_size": (8, 8), "padding": (0, 0), "output_padding": (0, 0)}
    return [*head.values(), *(v for name in plans.KEY_LISTS for v in lists.get(name, (1, 1)))]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that were asked for; all of them come."""
    kinds: list[str] = []
    monkeypatch.setattr(libraries, "serve", lambda kind: kinds.append(kind) or True)
    return kinds


def chosen(monkeypatch: pytest.MonkeyPatch, kernel: str) -> list[int]:
    """Has the planner choose a kernel; the record of its plan."""
    record = [plans.KERNEL_IDS[kernel], 5, 6]
    monkeypatch.setattr(plans, "record", lambda key: record)
    return record


@pytest.mark.parametrize("kernel", libraries.BY_OPERAND)
@pytest.mark.parametrize("dtype", KINDS)
def test_the_library_of_a_plan_is_there_before_the_answer(
    dtype: str, kernel: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = chosen(monkeypatch, kernel)
    assert plans.answer(key_of(dtype)) == record
    assert asked == [KINDS[dtype]]


@pytest.mark.parametrize("kernel", ["aten", "cpu_fprop", "direct_fprop", "direct_igrad"])
def test_what_the_asking_library_holds_is_not_asked_for(
    kernel: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = chosen(monkeypatch, kernel)
    assert plans.answer(key_of("float16")) == record
    assert asked == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_without_its_library_a_plan_is_pytorchs(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(monkeypatch, "mma_fprop")
    monkeypatch.setattr(libraries, "serve", lambda kind: False)
    monkeypatch.setattr(libraries, "_not_served", {KINDS[dtype]})
    assert plans.answer(key_of(dtype)) == [plans.KERNEL_IDS["aten"]]


def test_inside_a_cuda_graph_the_answer_is_not_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    record = chosen(monkeypatch, "mma_fprop")
    monkeypatch.setattr(libraries, "serve", lambda kind: False)
    assert plans.answer(key_of("float16")) == [plans.ASK_AGAIN]
    monkeypatch.setattr(libraries, "serve", lambda kind: True)
    assert plans.answer(key_of("float16")) == record


@pytest.mark.parametrize("stride", [2**17, 2**31, 2**62])
def test_steps_without_end_are_pytorchs(stride: int) -> None:
    """Nobody lists their phases: PyTorch computes them, or says what is wrong with them."""
    x, w = torch.randn(1, 2, 1), torch.randn(2, 2, 3)

    def outcome(function: Callable[..., torch.Tensor]) -> object:
        try:
            return function(x, w, stride=stride)
        except RuntimeError as error:
            return str(error).splitlines()[0]

    ours, theirs = outcome(upconv.conv_transpose1d), outcome(F.conv_transpose1d)
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs)
    else:
        assert ours == theirs


def test_a_given_plan_serves_until_the_end() -> None:
    key = key_of("float32", "cpu")
    before = plans.record(key)
    with plans.given("direct_fprop", (5, 6)):
        assert plans.record(key) == [plans.KERNEL_IDS["direct_fprop"], 5, 6]
        with plans.given("mma_fprop", (7,)):
            assert plans.record(key) == [plans.KERNEL_IDS["mma_fprop"], 7]
        assert plans.record(key)[1:] == [5, 6]
    assert plans.record(key) == before


def test_a_given_plan_is_what_a_call_runs() -> None:
    """Of another layer's plan a call says so, and is right again behind it."""
    x, w = torch.randn(1, 8, 40, 40), torch.randn(8, 8, 3, 3)
    expected = F.conv_transpose2d(x, w)
    torch.testing.assert_close(upconv.conv_transpose2d(x, w), expected)
    with (
        plans.given(cpu.KERNEL, (1, 2, 3)),
        pytest.raises(RuntimeError, match="does not fit the compiled"),
    ):
        upconv.conv_transpose2d(x, w)
    torch.testing.assert_close(upconv.conv_transpose2d(x, w), expected)
