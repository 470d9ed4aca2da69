"""Who records gradients: PyTorch's function where our kernels save less than recording costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from upconv.planner import ATEN, H200, Candidate, Hardware, Plan, Problem, make_plan
from upconv.recording import RECORDING_US, WORTH_RECORDING_US, why_pytorchs

CPU = Hardware("cpu", threads=2, isa="avx2")
PROBLEM = Problem.of(2, 16, 16, (8, 8), 4, 2, 1)


def plan(machine: Hardware, kernel: str, microseconds: float) -> Plan:
    return replace(make_plan(PROBLEM, machine), chosen=Candidate(kernel, microseconds))


def saving(microseconds: float) -> Plan:
    """A plan for a GPU that saves as much."""
    usual = plan(H200, "mma_fprop", 0.0)
    return plan(H200, "mma_fprop", usual.saved_microseconds - microseconds)


@pytest.mark.parametrize("share", [0.5, 0.99, 1.0, 10.0])
def test_on_a_cpu_long_calls_are_ours(share: float) -> None:
    reason = why_pytorchs([plan(CPU, "cpu_fprop", share * WORTH_RECORDING_US)])
    assert bool(reason) == (share < 1)
    assert not reason or f"below {WORTH_RECORDING_US:.0f} us" in reason


def test_on_a_gpu_all_passes_count_together() -> None:
    third = saving(RECORDING_US / 3 + 1)
    assert why_pytorchs([third])
    assert f"save {2 * RECORDING_US / 3 + 2:.3g} us in all passes" in why_pytorchs([third] * 2)
    assert not why_pytorchs([third] * 3)
    assert not why_pytorchs([third], forced=True)


def test_on_a_gpu_a_pass_of_pytorchs_saves_nothing() -> None:
    theirs = plan(H200, ATEN, 1e-3)  # expected to be faster than PyTorch itself
    assert why_pytorchs([theirs] * 3)
    assert why_pytorchs([theirs] * 3, forced=True)
    assert not why_pytorchs([theirs, saving(RECORDING_US)])
