"""Comparing two result files: what counts as slower, and what cannot be compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from upconv import tables
from upconv.bench import Row, Settings, Timing, report
from upconv.cases import Case
from upconv.comparison import Change, compare

TINY = Case("tiny", 2, 4, 6, (5, 6), (3, 3), 2, 1, 1, 1, 2)
SETTINGS = Settings()


def timing(median: float, spread: float = 0.0) -> Timing:
    """With quartiles that far from the median, as a share of it."""
    return Timing(median, median * (1 - spread), median * (1 + spread), median / 2, 9)


def row_of(median: float, batch: int = 2, name: str = "tiny", spread: float = 0.0) -> Row:
    times = {"torch": timing(9.0), "upconv": timing(median, spread)}
    errors = {"torch": 0.0, "upconv": 0.0}
    problem = TINY.problem(batch)
    return Row(name, problem, 2, "cpu_fprop", "", "forward", errors, 1e-6, times)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (timing(10), timing(10.9), "same"),
        (timing(10), timing(11.1), "slower"),
        (timing(11.1), timing(10), "faster"),
        (timing(10.9), timing(10), "same"),
        # Quartiles of 15 % on both sides: 25 % more may be chance, 40 % is not.
        (timing(10, 0.15), timing(12.5, 0.15), "same"),
        (timing(12.5, 0.15), timing(10, 0.15), "same"),
        (timing(10, 0.15), timing(14, 0.15), "slower"),
        (timing(14, 0.15), timing(10, 0.15), "faster"),
        (timing(10), None, "WRONG now"),
    ],
)
def test_slower_is_more_than_a_tenth_and_more_than_the_spread(
    old: Timing, new: Timing | None, verdict: str
) -> None:
    change = Change("a", old, new)
    assert change.verdict == verdict
    assert change.bad == (verdict in ("slower", "WRONG now"))


def test_only_the_same_is_compared() -> None:
    old = report([row_of(10.0), row_of(1.0, name="cut"), row_of(1.0, name="gone")], SETTINGS)
    rows = [row_of(20.0), row_of(9.0, batch=1, name="cut"), row_of(1.0, name="new")]
    found = compare(old, report(rows, SETTINGS))
    assert [(change.case, change.ratio) for change in found.changes] == [("tiny", 2.0)]
    assert found.left_out == {
        "cut": "batch 2 in the old file, 1 now",
        "new": "not in the old file",
    }
    assert found.bad
    assert tables.comparison_lines(found)[0] == "1 cases compared: 1 slower"


def test_another_device_or_dtype_is_not_compared() -> None:
    """And a comparison of nothing is not a good one."""
    row = row_of(10.0)
    old = report([row], SETTINGS)
    found = compare(old | {"settings": old["settings"] | {"device": "cuda"}}, old)
    assert found.changes == []
    assert found.bad
    assert tables.comparison_lines(found)[0] == "no case is in both files"
    half = replace(row, problem=TINY.problem(dtype="float16"))
    assert compare(old, report([half], SETTINGS)).changes == []


def test_a_result_that_is_wrong_now_is_worse() -> None:
    wrong = replace(row_of(1.0), times={}, errors={"torch": 0.0, "upconv": 0.5})
    found = compare(report([row_of(1.0)], SETTINGS), report([wrong], SETTINGS))
    assert found.bad
    assert [change.verdict for change in found.changes] == ["WRONG now"]


def test_what_else_changed_is_said() -> None:
    new = report([row_of(1.0)], SETTINGS)
    old = new | {"environment": new["environment"] | {"torch": "1.0"}}
    found = compare(old, new)
    assert found.notes == [f"torch 1.0 in the old file, {new['environment']['torch']} now"]
    assert not found.bad
