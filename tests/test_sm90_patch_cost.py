"""The cost rule of the Hopper kernel for patches, and the measurements behind it."""

from __future__ import annotations

from typing import Any

import pytest
from pixel_kernels import lost, measurements, picked

from upconv.planner import Problem


@pytest.fixture(scope="module")
def measured() -> list[tuple[Problem, dict[str, Any], list[tuple[Any, float]]]]:
    return measurements("h200-patches-2026-11-16.jsonl.gz")


@pytest.mark.parametrize("direction", ["forward", "grad_input", "grad_weight"])
def test_what_the_rule_picks_is_among_the_fastest(measured: Any, direction: str) -> None:
    losses = [lost(choices) for p, _, choices in measured if p.direction == direction]
    assert len(losses) > 30
    assert sum(losses) / len(losses) < 0.01
    assert max(losses) < 0.15


def test_the_kernels_for_all_layers_were_slower_wherever_these_serve(measured: Any) -> None:
    """What SUPERSEDED in upconv/planner/plan.py says."""
    gains = [line["other"] / picked(choices) for _, line, choices in measured]
    assert len(gains) == 267
    assert min(gains) > 0.99
