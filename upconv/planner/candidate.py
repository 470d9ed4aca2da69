"""What a kernel's planner module answers when asked about a problem."""

from __future__ import annotations

from dataclasses import dataclass, field

ATEN = "aten"
"""PyTorch's own operator: always legal, and the end of every chain."""


@dataclass(frozen=True)
class Candidate:
    """A kernel that can serve a problem: its configuration and the time it should take.

    `params` is what the compiled side receives, one flat list of integers whose meaning the
    kernel's planner module and its C++ header state together. `notes` says in words why the
    configuration was chosen; `explain` prints it.
    """

    kernel: str
    microseconds: float
    params: tuple[int, ...] = field(repr=False, default=())
    notes: tuple[str, ...] = ()
    with_bias: bool = False
    """The weight's gradient: the bias's comes with it."""


@dataclass(frozen=True)
class Refusal:
    """A kernel that cannot serve, or that another one beats, and why."""

    kernel: str
    reason: str
