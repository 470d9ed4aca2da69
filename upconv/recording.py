"""Who serves a call that records gradients.

Ours are recorded in Python. A call that gains less by our kernels than that costs takes PyTorch's
function, which records in C++.
"""

from __future__ import annotations

from collections.abc import Sequence

from .planner import ATEN, Plan

WORTH_RECORDING_US = 100.0
"""On a CPU a shorter call that records gradients takes PyTorch's function: ours are recorded in
Python, about 30 us more a call, which a kernel that runs for 100 us or more can be expected to win
back."""
RECORDING_US = 30.0
"""On a GPU the kernels of all passes together must be expected to save as much."""


def why_pytorchs(passes: Sequence[Plan], forced: bool = False) -> str:
    """Why PyTorch's function is to record a call; empty where our operator is.

    `passes` are the plans of the forward pass and, on a GPU, of the gradients that are wanted.
    """
    forward = passes[0]
    if forward.hardware.kind == "cpu":
        short = forward.chosen.microseconds < WORTH_RECORDING_US
        limit = f"{WORTH_RECORDING_US:.0f} us"
        return f"below {limit} recording ours takes longer than it saves" if short else ""
    ours = [each for each in passes if each.kernel != ATEN]
    saved = sum(each.saved_microseconds for each in ours)
    if ours and (forced or saved >= RECORDING_US):
        return ""
    return (
        f"recording ours takes {RECORDING_US:.0f} us, and upconv's kernels should save"
        f" {saved:.3g} us in all passes"
    )
