"""The Hopper kernel's cost rule: what it adds up, and the measurements behind its constants."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from upconv.planner import H200, Problem, sm90, sm90_cost
from upconv.planner.sm90_task import forward_task, input_gradient_task, shapes
from upconv.planner.sm90_tiling import tilings

ROOT = Path(__file__).resolve().parent.parent


def test_the_cycles_of_a_unit_are_the_sum_of_what_explain_names() -> None:
    for constants in sm90_cost.CONSTANTS:
        stages = len(sm90_cost.UnitWork.__dataclass_fields__) - 1
        work = sm90_cost.UnitWork(*range(1, 1 + stages), constants=constants)
        assert work.cycles == pytest.approx(sum(work.terms.values()) + constants["unit"])


@pytest.fixture(scope="module")
def fit() -> Any:
    """benchmarks/fit_sm90.py."""
    spec = importlib.util.spec_from_file_location("fit_sm90", ROOT / "benchmarks" / "fit_sm90.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("column", "slower"), list(enumerate([1.02, 1.02, 1.04, 1.04])))
def test_the_cost_rule_is_what_the_measurements_give(fit: Any, column: int, slower: float) -> None:
    """What it picks is nearly the fastest, and more fitting would hardly change the constants."""
    names, better, runs = fit.fitted(column, steps=40)
    ours = fit.known(names, column)
    assert float(runs.picked(ours)[runs.weight >= 1].mean().exp()) < slower
    assert float(fit.loss(runs, ours)) < 1.03 * float(fit.loss(runs, better))


def test_the_rule_of_split_operands_is_what_the_measurements_give(fit: Any) -> None:
    constants, spread = fit.split_fitted()
    ours = {name: sm90_cost.CYCLES[name][-1] for name in constants}
    assert constants == pytest.approx(ours, rel=0.01)
    assert spread < 0.1


def test_the_measured_work_is_what_the_planner_counts(fit: Any) -> None:
    for row in fit.problems_of()[3::60]:
        batch, cin, cout, size, kernel, stride, padding, out_padding, groups, dilation = row[
            "layer"
        ]
        problem = Problem.of(
            *(
                batch,
                cin,
                cout,
                tuple(size),
                kernel,
                stride,
                padding,
                out_padding,
                dilation,
                groups,
            ),
            dtype=row["dtype"],
            tf32=True,
            direction=row["direction"],
            channels_last=row["channels_last"],
        )
        measured = dict(zip(map(tuple, row["tilings"]), row["rows"], strict=True))
        found = 0
        task_of = {"forward": forward_task, "grad_input": input_gradient_task}[row["direction"]]
        for number, shape in enumerate(shapes(task_of(problem))):
            by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in sm90.BLOCKS}
            for tiling in tilings(shape, by_blocks, H200):
                area, weights, box = tiling.area, tiling.weights, tiling.box
                identity = (
                    *(number, tiling.n, tiling.blocks, int(tiling.alternate), weights.rings),
                    *(weights.stages, int(weights.resident), area.copy, area.images, area.height),
                    *(area.width, tiling.slice_blocks, tiling.slots, box.raw_blocks),
                    *(box.raw_chunks, tiling.turn_slices),
                )
                if identity in measured:
                    found += 1
                    work = [getattr(tiling.work, name) for name in row["names"]]
                    assert work == pytest.approx(measured[identity][4:], rel=1e-4), identity
        # Others have slices of a turn, or boxes, that are not planned any more.
        assert found > len(measured) / 4
