"""The ways of calling PyTorch: which of them a problem takes, and that each is what it says."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from upconv import accuracy, contenders
from upconv.contenders import contender, peers
from upconv.gradients import make_grad_output
from upconv.planner import Problem


def problem_of(ndim: int = 2, size: int = 5, channels_last: bool = False) -> Problem:
    return Problem.of(2, 4, 6, (size,) * ndim, 3, stride=2, channels_last=channels_last)


def test_who_takes_part() -> None:
    everyone = list(contenders.KEYS)
    assert peers(everyone, problem_of(), "cuda") == (list(contenders.KEYS.values()), {})
    names, skipped = peers(everyone, problem_of(1), "cpu")
    assert names == ["torch", "compile"]
    assert "for GPUs only" in skipped["benchmark"]
    assert "1-D tensors" in skipped["channels_last"]
    names, skipped = peers(["channels_last"], problem_of(channels_last=True), "cuda")
    assert (names, skipped) == ([], {"channels_last": "the input is channels_last already"})


@pytest.mark.parametrize("ndim", [2, 3])
def test_channels_last_runs_on_channels_last_tensors(
    monkeypatch: pytest.MonkeyPatch, ndim: int
) -> None:
    seen: list[Tensor] = []

    def watched(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
        seen.extend((x, weight))
        return x

    monkeypatch.setitem(accuracy.TORCH_OPERATORS, ndim, watched)
    problem = problem_of(ndim)
    inputs = accuracy.make_inputs(problem)
    contender("channels_last", inputs, problem).call()
    layout = torch.channels_last if ndim == 2 else torch.channels_last_3d
    assert all(tensor.is_contiguous(memory_format=layout) for tensor in seen)
    assert all(map(torch.equal, seen, (inputs.x, inputs.weight)))


def test_benchmark_is_on_during_its_calls_only_and_in_a_thread_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch keeps the algorithms it chose per thread."""
    seen: list[tuple[bool, int]] = []

    def watched(x: Tensor, *rest: object) -> Tensor:
        seen.append((torch.backends.cudnn.benchmark, threading.get_ident()))
        return x

    monkeypatch.setitem(accuracy.TORCH_OPERATORS, 2, watched)
    problem = problem_of()
    inputs = accuracy.make_inputs(problem)
    made = contender("benchmark", inputs, problem)
    assert made.do(lambda call: call()[0]) is made.do(lambda call: call()[0]) is inputs.x
    contender("torch", inputs, problem).do(lambda call: call())
    (on, thread), (still_on, same), (off, here) = seen
    assert (on, still_on, off) == (True, True, False)
    assert thread == same != here == threading.get_ident()


def test_gradients_are_everyones() -> None:
    """Every way of calling PyTorch gives the same ones; channels_last on such a grad_output."""
    problem = problem_of()
    inputs, grad_output = accuracy.make_inputs(problem), make_grad_output(problem)
    expected = contender("torch", inputs, problem, grad_output).call()
    for name in ("channels_last", "benchmark", "compile", "upconv"):
        found = contender(name, inputs, problem, grad_output).do(lambda call: call())
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        if name == "channels_last":
            assert found[0].is_contiguous(memory_format=torch.channels_last)


def test_every_size_is_compiled() -> None:
    """torch.compile gives up after some sizes of one function and runs it as it is: not here."""
    # Dynamo's own patch: monkeypatch deletes what it finds only through the config's __getattr__.
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for size in (5, 6):
            problem = problem_of(size=size)
            inputs = accuracy.make_inputs(problem)
            with torch.no_grad():
                (y,) = contender("compile", inputs, problem).call()
            torch.testing.assert_close(y, inputs.run(accuracy.TORCH_OPERATORS[2]))
    assert torch._dynamo.config.recompile_limit > 1
