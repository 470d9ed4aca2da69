"""Forms of the Hopper kernels for patches and phases with writers: which tilings there are.

Their code runs on a CPU with that of the other forms, in tests/test_sm90_patch.py and
tests/test_sm90_phases.py.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from upconv.planner import H200, Problem, sm90_patch, sm90_phases


def layer(kernel: int | tuple[int, ...], *steps: object, **rest: object) -> Problem:
    values = {"size": (8, 16), "tf32": True, **rest}
    return Problem.of(2, 40, 24, values.pop("size"), kernel, *steps, **values)  # type: ignore[arg-type]


CASES = {
    "patches": (sm90_patch, layer(2, 2), True),
    "pairs of channels": (sm90_patch, layer(2, 2, size=(14, 14), dtype="bfloat16"), True),
    "patches 3 high": (sm90_patch, layer((3, 2), (3, 2)), True),
    "patches 4 wide": (sm90_patch, layer(4, 4), False),
    "strict float32": (sm90_patch, layer(2, 2, tf32=False), False),
    "the input's gradient": (sm90_patch, layer(2, 2, direction="grad_input"), False),
    "channels_last": (sm90_patch, layer(2, 2, channels_last=True), False),
    "phases": (sm90_phases, layer(4, 2, 1), True),
    "phases, no whole fours": (sm90_phases, layer(3, 2, 1), False),
    "phases, the input's gradient": (sm90_phases, layer(4, 2, 1, direction="grad_input"), False),
}


@pytest.mark.parametrize(("planner", "problem", "there"), CASES.values(), ids=CASES)
def test_writers_are_on_trial(planner: ModuleType, problem: Problem, there: bool) -> None:
    """The planner has no such tiling; measurements and tests have."""
    assert planner.refusal(problem, H200) is None
    usual, every = (
        list(planner.tilings(problem.in_three(), H200, trial)) for trial in (False, True)
    )
    assert usual
    assert not any(tiling.stage_pieces for tiling in usual)
    assert any(tiling.stage_pieces for tiling in every) == there
    assert [tiling for tiling in every if not tiling.stage_pieces] == usual


@pytest.mark.parametrize(
    "problem", [layer(2, 2), layer(2, 2, size=(14, 14), dtype="bfloat16")], ids=str
)
def test_patches_fit_into_shared_memory(problem: Problem) -> None:
    for tiling in sm90_patch.tilings(problem.in_three(), H200, on_trial=True):
        taken = tiling.weight_stages * tiling.n * 32 * sm90_patch.steps(problem)
        taken += 2 * tiling.box_stages * sm90_patch.box_bytes(problem)
        if tiling.stage_pieces:
            pieces = tiling.stage_pieces * sm90_patch.piece_bytes(problem)
            taken += sm90_patch.STAGE_BARRIERS + 2 * (sm90_patch.TABLE_BYTES + pieces)
        assert sm90_patch.HEADER_BYTES + taken <= H200.shared_memory
