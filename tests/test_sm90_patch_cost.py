"""The cost rule of the Hopper kernel for patches, and the measurements behind it."""

from __future__ import annotations

from typing import Any

import pytest
from pixel_kernels import measurements

from upconv.planner import H200, Problem


@pytest.fixture(scope="module")
def measured() -> list[tuple[Problem, dict[str, Any], list[tuple[Any, float]]]]:
    return measurements("h200-patches-2026-11-16.jsonl.gz")


@pytest.mark.parametrize("direction", ["forward", "grad_input", "grad_weight"])
def test_what_the_rule_picks_is_among_the_fastest(measured: Any, direction: str) -> None:
    lost = []
    for problem, _, choices in measured:
        if problem.direction != direction:
            continue
        assert choices, "the planner has none of the tilings that were measured"
        _, picked = min(choices, key=lambda choice: choice[0].microseconds(H200))
        lost.append(picked / min(ms for _, ms in choices) - 1)
    assert len(lost) > 30
    assert sum(lost) / len(lost) < 0.01
    assert max(lost) < 0.15


def test_the_kernels_for_all_layers_were_slower_wherever_these_serve(measured: Any) -> None:
    """What SUPERSEDED in upconv/planner/plan.py says."""
    gains = []
    for _, line, choices in measured:
        _, picked = min(choices, key=lambda choice: choice[0].microseconds(H200))
        gains.append(line["other"] / picked)
    assert len(gains) == 267
    assert min(gains) > 0.99
