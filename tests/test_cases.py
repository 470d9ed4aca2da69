"""The built-in cases: well-formed, and found by name."""

from __future__ import annotations

import pytest

from upconv.cases import CASES, select
from upconv.explain import check


def test_every_case_is_a_problem() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 26
    for case in CASES:
        check(case.problem())
        assert len(case.kernel) == case.ndim
    assert {case.ndim for case in CASES} == {1, 2, 3}


def test_selection() -> None:
    assert select([]) == list(CASES)
    assert [case.name for case in select(["unet*"])] == ["unet_up1", "unet_up4"]
    assert [case.name for case in select(["kb57", "kb69"])] == ["kb69", "kb57"]
    assert all(case.ndim == 3 for case in select([], {3}))
    assert select(["kb69"], {1}) == []


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'kb99'; there are kb69, kb65"):
        select(["kb69", "kb99"])
