"""Timing: who is next, how often, and what a call takes beside its results."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from upconv import stopwatch
from upconv.contenders import Contender
from upconv.stopwatch import Timing, runs_for, scratch_bytes, timed, turns


def test_contenders_take_turns() -> None:
    assert list(turns(["a", "b"], 3)) == ["a", "b", "b", "a", "a", "b"]


def test_medians_with_quartiles() -> None:
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 50.0]) == Timing(3.0, 2.0, 4.0, 1.0, 5)


def test_how_many_runs() -> None:
    assert runs_for(1.0, 0.1) == 10
    assert runs_for(1.0, 10.0) == stopwatch.FEWEST_RUNS
    assert runs_for(1.0, 10.0, fewest=3) == 3
    assert runs_for(1.0, 0.0) == stopwatch.MOST_RUNS


def test_every_call_counts() -> None:
    calls = {"quick": 0, "slow": 0}

    def contender(name: str, seconds: float) -> Contender:
        def call() -> tuple[Tensor, ...]:
            calls[name] += 1
            time.sleep(seconds)
            return ()

        return Contender(call)

    found = timed({name: contender(name, 0.002) for name in calls}, 0.02, "cpu")
    assert found["quick"].runs == found["slow"].runs >= stopwatch.FEWEST_RUNS
    assert calls["quick"] == calls["slow"] == found["quick"].runs + 2  # two to warm up
    assert found["slow"].fastest >= 2.0


@pytest.mark.gpu
def test_scratch_is_what_is_neither_input_nor_result() -> None:
    x = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")

    def doubled_by_way_of_a_copy() -> tuple[Tensor, ...]:
        copy = x.clone()
        return (copy + copy,)

    assert scratch_bytes(doubled_by_way_of_a_copy) == x.nbytes
    assert scratch_bytes(lambda: (x + x, x + x)) == 0


@pytest.mark.gpu
def test_a_call_that_takes_the_host_long_is_hidden_behind_flushes() -> None:
    """Half a millisecond on the host and microseconds on the GPU: the latter is what is timed."""
    x = torch.zeros(1, device="cuda")

    def slow_to_launch() -> tuple[Tensor, ...]:
        end = time.perf_counter() + 5e-4
        while time.perf_counter() < end:
            pass
        return (x + x,)

    found = timed({"a": Contender(slow_to_launch)}, 0.05, "cuda")
    assert found["a"].median < 0.25
