"""The planner's choices on layers that were drawn, not tuned for, with the times measured there.

benchmarks/survey.py drew the layers and timed PyTorch and every kernel on an H200; the times are in
benchmarks/results. What is checked is the choice that the planner makes today.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import FOLDER, script
from pixel_kernels import measurements

from upconv.cases import Case
from upconv.planner import (
    ATEN,
    H200,
    Problem,
    cuda_aten,
    make_plan,
    sm90,
    sm90_patch,
    sm90_phases,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200-survey-2026-11-15.jsonl"
SLOWER = 1.1


def rows(direction: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return [row for row in every if row["direction"] == direction]


def problem_of(row: dict[str, Any]) -> Problem:
    case = Case(*(tuple(v) if isinstance(v, list) else v for v in row["case"]))
    tf32 = row["dtype"] == "tf32"
    return case.problem(
        dtype="float32" if tf32 else row["dtype"],
        tf32=tf32,
        channels_last=row["layout"] == "channels_last",
    )


def surveyed(direction: str) -> Iterator[tuple[Problem, dict[str, float]]]:
    """Layers, and the milliseconds of kernels that were timed, by themselves or as the choice of
    that day."""
    for row in rows(direction):
        times = dict(row["milliseconds"])
        ours, chosen = times.pop("upconv"), row["chosen"]
        if len(chosen) == 1:
            times[chosen[0]] = ours
        yield problem_of(row), {**times, ATEN: times.pop("torch")}


def later(direction: str) -> Iterator[tuple[Problem, dict[str, float]]]:
    """The same for kernels that came after the survey."""
    for planner, name in ((sm90_patch, "patches"), (sm90_phases, "phases")):
        for problem, line, choices in measurements(f"h200-{name}-2026-11-16.jsonl.gz"):
            if problem.direction == direction:
                _, ms = min(choices, key=lambda choice: choice[0].microseconds(H200))
                yield (
                    problem,
                    {planner.KERNEL: ms, sm90.KERNEL: line["other"], ATEN: line["pytorch"]},
                )


@pytest.mark.slow
def test_no_choice_was_measured_to_be_slower_than_pytorch() -> None:
    """On the survey's layers, and on those that later kernels were measured on."""
    known, wins = 0, 0
    for problem, times in (*surveyed("forward"), *later("forward")):
        kernel = make_plan(problem, H200).kernel
        if kernel not in times:
            continue
        known += 1
        wins += kernel != ATEN
        assert times[kernel] <= SLOWER * times[ATEN], (problem, times)
    assert known > 80
    assert wins > 60


def test_the_estimate_of_pytorchs_time_seldom_exceeds_it() -> None:
    """What PyTorch loses by mistake is slower, what it keeps by mistake is slow."""
    every = rows("forward")
    above = [
        row
        for row in every
        if cuda_aten.aten_microseconds(problem_of(row)) / 1e3 > 1.2 * row["milliseconds"]["torch"]
    ]
    assert len(above) <= 0.2 * len(every), above


def test_drawn_layers_are_legal_and_of_the_promised_size() -> None:
    survey = script("survey")
    rng = random.Random(3)
    cases = [survey.drawn(number, rng) for number in range(50)]
    assert len({case[1:] for case in cases}) > 45
    assert {case.ndim for case in cases} == {1, 2, 3}
    for case in cases:
        problem = case.problem()
        assert min(problem.out_size) > 0
        assert survey.LEAST_GFLOP < problem.flops / 1e9 < survey.MOST_GFLOP


def test_what_is_served_is_reported_with_every_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    row = {"call": "forward TF32", "kernel": "ours", "problem": "a layer", "aten": 100.0}
    script("served").report([{**row, "us": 25.0}, {**row, "us": 100.0}, {**row, "us": 125.0}])
    lost, summary = capsys.readouterr().out.splitlines()
    assert lost == "1.25 ours a layer"
    assert summary.split() == ["forward", "TF32", "3", "calls,", "1.47", "times", "as", "fast"]
