"""The Hopper kernel's cost rule: what it adds up, and the measurements behind its constants."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import script
from sm90_references import TASKS

from upconv.planner import H200, Problem, sm90, sm90_area, sm90_cost, sm90_search
from upconv.planner.sm90_search import tilings
from upconv.planner.sm90_task import shapes


@pytest.fixture(scope="module")
def fit() -> Any:
    return script("fit_sm90")


@pytest.fixture(scope="module")
def measure() -> Any:
    return script("measure_sm90")


def test_the_cycles_of_a_unit_are_the_sum_of_what_explain_names() -> None:
    for constants in sm90_cost.CONSTANTS:
        stages = len(sm90_cost.UnitWork.__dataclass_fields__) - 1
        work = sm90_cost.UnitWork(*range(1, 1 + stages), constants=constants)
        assert work.cycles == pytest.approx(sum(work.terms.values()) + constants["unit"])


@pytest.mark.parametrize(("column", "slower"), list(enumerate([1.02, 1.02, 1.04, 1.04, 1.02])))
def test_the_cost_rule_is_what_the_measurements_give(fit: Any, column: int, slower: float) -> None:
    """What it picks is nearly the fastest, and more fitting would hardly change the constants."""
    names, better, runs = fit.fitted(column, steps=40)
    ours = fit.known(names, column)
    assert float(runs.picked(ours)[runs.weight >= 1].mean().exp()) < slower
    assert fit.loss(runs, ours) < 1.03 * fit.loss(runs, better)


@pytest.mark.parametrize("column", range(4))
def test_what_it_picks_for_drawn_layers_is_nearly_the_fastest(fit: Any, column: int) -> None:
    """Layers that nothing was fitted to."""
    names, runs = fit.read(column, fit.DRAWN)
    assert len(runs.weight) > 90
    assert float(runs.picked(fit.known(names, column)).mean().exp()) < 1.06


def test_the_measured_work_is_what_the_planner_counts(fit: Any, measure: Any) -> None:
    for line in [*fit.read_rows(fit.TILINGS)[3::60], *fit.read_rows(fit.STRIPS)[5::60]]:
        *sizes, groups, dilation = line["layer"]
        problem = Problem.of(
            *sizes,
            dilation,
            groups,
            tf32=not line.get("split"),
            **{name: line[name] for name in ("dtype", "direction", "channels_last")},
        )
        rows = fit.rows_of(line, measure.NAMES)
        measured = dict(zip(map(tuple, line["tilings"]), rows, strict=True))
        found = 0
        for number, shape in enumerate(shapes(measure.task_of(problem))):
            by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in sm90.BLOCKS}
            for tiling in tilings(shape, by_blocks, H200):
                identity = measure.identity_of(number, tiling)
                if "strip" not in line["identity"] and identity[-1] == sm90_area.GROUP:
                    identity = identity[:-1]
                if identity in measured:
                    found += 1
                    row = measure.row_of(problem, tiling, H200, measured[identity][0])
                    assert row == pytest.approx(measured[identity], rel=1e-4), identity
        # Others have slices of a turn, or boxes, that are not planned any more.
        assert found > len(measured) / 4


def test_what_is_measured_is_what_the_fit_reads(fit: Any, measure: Any, tmp_path: Path) -> None:
    """Were all times as expected, what is picked would be the fastest."""
    path = tmp_path / "tilings.jsonl.gz"
    problems = [
        problem
        for problem in (*measure.problems(["kb71"]), *measure.problems(["kb64_1d"]))
        if problem.dtype == "bfloat16" and not problem.channels_last
    ]
    assert len(problems) == 4
    with gzip.open(path, "wt") as file:
        for problem in problems:
            choices = measure.chosen(problem, H200)
            assert 10 < len({choice.identity for choice in choices}) == len(choices)
            times = [choice.tiling.cycles / 1e3 / sm90_cost.CLOCK_MHZ for choice in choices]
            file.write(json.dumps(measure.line_of(problem, choices, times, H200)) + "\n")
    names, runs = fit.read(1, [path])
    ours = fit.known(names, 1)
    assert runs.expected(ours).tolist() == pytest.approx(runs.cycles.tolist(), rel=1e-3)
    assert float(runs.picked(ours).max()) == pytest.approx(0, abs=1e-3)


SEARCHED = {
    "stride 1": Problem.of(8, 64, 64, (96, 96), 3, tf32=True),
    "phases": Problem.of(16, 128, 64, (32, 32), 4, 2, 1, dtype="bfloat16"),
    "a vocoder": Problem.of(4, 256, 128, (500,), 16, 8, 4, tf32=True),
    "lines": Problem.of(4, 32, 64, (64, 128), 3, 5, 1, dilation=2, dtype="bfloat16"),
    "groups": Problem.of(4, 64, 64, (40, 44), 3, 2, 1, 1, groups=4, tf32=True),
    "strict": Problem.of(4, 64, 32, (40, 44), 3),
    "channels_last": Problem.of(4, 64, 32, (40, 44), 3, tf32=True, channels_last=True),
    "a volume": Problem.of(2, 48, 24, (9, 20, 24), 3, tf32=True),
}


@pytest.mark.parametrize("direction", TASKS)
@pytest.mark.parametrize("name", SEARCHED)
def test_the_search_finds_the_fastest_of_all_and_looks_at_few(
    name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = []
    for shape in shapes(TASKS[direction](SEARCHED[name])):
        by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in sm90.BLOCKS}
        every += sm90_search.openings(shape, by_blocks, H200)
    all_of_them = [(opening, tiling) for opening in every for tiling in opening.tilings()]
    first = min(all_of_them, key=lambda found: found[1].cycles)
    looked_at = 0
    original = sm90_search.Opening.tilings

    def counted(opening: sm90_search.Opening) -> Any:
        nonlocal looked_at
        for tiling in original(opening):
            looked_at += 1
            yield tiling

    monkeypatch.setattr(sm90_search.Opening, "tilings", counted)
    assert sm90_search.fastest(every) == first
    # Gradients have fewer tilings, and the rings are more of their work.
    assert direction != "forward" or looked_at < 0.6 * len(all_of_them)


def test_no_tiling_takes_less_than_its_opening_promises() -> None:
    for problem in SEARCHED.values():
        for shape in shapes(TASKS["forward"](problem)):
            by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in sm90.BLOCKS}
            for opening in sm90_search.openings(shape, by_blocks, H200):
                least = opening.least_cycles(opening.common())
                assert all(tiling.cycles >= least for tiling in opening.tilings())
