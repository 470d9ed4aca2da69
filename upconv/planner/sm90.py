"""The Hopper kernel's side of the planner: when it may serve, what it costs, what it is told."""

from __future__ import annotations

from .candidate import Candidate, Refusal
from .problem import Hardware, Problem

KERNEL = "sm90_wgmma_fprop"


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    return Refusal(KERNEL, "not written yet")
