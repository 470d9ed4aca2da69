"""The plan of the weight's gradient on Hopper, as far as a machine without a GPU can test it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import wgrad_emulator as emulator
from benchmark_scripts import script
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from wgrad_references import any_plan, box_problems, expected, odd_problems, problems

from upconv.planner import (
    H200,
    Candidate,
    Problem,
    Refusal,
    sm90_patch,
    sm90_patch_wgrad,
    sm90_walk,
    sm90_wgrad,
    sm90_wgrad_chunks,
)
from upconv.planner.sm90_wgrad_jobs import FORMS, Form

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "upconv" / "csrc" / "cuda"


def candidate(problem: Problem, multiprocessors: int = 132) -> Candidate:
    answer = sm90_wgrad.consider(problem, replace(H200, multiprocessors=multiprocessors))
    assert isinstance(answer, Candidate), answer
    return answer


def check_emulated(problem: Problem, params: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((problem.batch, problem.in_channels, *problem.in_size))
    gy = rng.standard_normal((problem.batch, problem.out_channels, *problem.out_size))
    deep = [a.reshape(*a.shape[:2], *(1,) * (3 - problem.ndim), *a.shape[2:]) for a in (x, gy)]
    wanted = expected(problem, x, gy)
    gw = emulator.run(params, *deep).reshape(wanted.shape)
    np.testing.assert_allclose(gw, wanted, rtol=1e-9, atol=1e-9)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([1, 8, 132]))
def test_the_emulated_kernel_computes_the_gradient(problem: Problem, sms: int) -> None:
    answer = sm90_wgrad.consider(problem, replace(H200, multiprocessors=sms))
    assume(isinstance(answer, Candidate))
    assert isinstance(answer, Candidate)
    check_emulated(problem, answer.params)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems(), st.randoms(use_true_random=False))
def test_every_form_computes_the_gradient(problem: Problem, rng: Random) -> None:
    """Any plan that the planner may choose, not the cheapest alone."""
    problem = replace(problem, batch=1)
    check_emulated(problem, any_plan(problem, 4, rng))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(box_problems(), st.randoms(use_true_random=False))
def test_every_kind_of_box_brings_grad_output(problem: Problem, rng: Random) -> None:
    """Rows, slices and channels that follow each other as one, classes, images side by side."""
    problem = replace(problem, batch=min(problem.batch, 3), in_channels=8)
    check_emulated(problem, any_plan(problem, 2, rng, boxes=True))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(odd_problems(), st.randoms(use_true_random=False))
def test_rows_that_begin_anywhere_come_as_they_lie_in_memory(problem: Problem, rng: Random) -> None:
    problem = replace(problem, batch=min(problem.batch, 3), in_channels=8)
    check_emulated(problem, any_plan(problem, 2, rng, odd=True))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(odd_problems(bias=True), st.randoms(use_true_random=False))
def test_every_element_of_odd_rows_is_added_to_the_bias_once(problem: Problem, rng: Random) -> None:
    check_bias(problem, any_plan(problem, 3, rng, bias=True, odd=True))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(box_problems(), st.sampled_from([1, 3, 7]), st.randoms(use_true_random=False))
def test_every_element_is_added_to_the_bias_once(problem: Problem, sms: int, rng: Random) -> None:
    problem = replace(problem, batch=min(problem.batch, 3))
    check_bias(problem, any_plan(problem, sms, rng, bias=True))


def check_bias(problem: Problem, params: tuple[int, ...]) -> None:
    gy = np.random.default_rng(0).standard_normal(
        (problem.batch, problem.out_channels, *problem.out_size)
    )
    deep = gy.reshape(*gy.shape[:2], *(1,) * (3 - problem.ndim), *gy.shape[2:])
    wanted = gy.sum(tuple(i for i in range(gy.ndim) if i != 1))
    np.testing.assert_allclose(emulator.bias(params, deep), wanted, rtol=1e-9, atol=1e-9)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems(), st.integers(1, 300), st.integers(1, 300), st.integers(1, 600))
def test_every_plan_keeps_the_limits_of_the_kernel(
    problem: Problem, h: int, w: int, batch: int
) -> None:
    problem = replace(problem, in_size=(2, h, w)[-problem.ndim :], batch=batch)
    assume(min(problem.out_size) > 0)
    plan = emulator.Plan(candidate(problem).params)
    form = (plan.consumers, plan.tile_n, plan.groups, plan.run, plan.pairs, plan.odd)
    assert form in FORMS
    vectors = emulator.UNIT * plan.element // 16
    pairs = plan.pairs and plan.element == 2
    pixels = plan.segment * plan.images
    assert pixels % emulator.UNIT == 0
    chunk = pixels // emulator.UNIT * vectors * (plan.tile_n * 16 + (32 if pairs else 16))
    chunk = pixels * plan.element * plan.tile_n if plan.slab else -(-chunk // 128) * 128
    assert plan.input_bytes == chunk
    boxes = 1 if plan.copy or plan.together else plan.images
    chunk += plan.planes * plan.rows * plan.pitch * plan.point * boxes
    unit = 1024 if plan.slab else 128
    stage = -(-chunk // unit) * unit
    assert plan.stage_bytes == stage
    assert sm90_wgrad_chunks.FIXED_BYTES + plan.stages * stage <= 227 * 1024
    assert plan.stages <= emulator.header_constant("kWgradMaxStages")
    assert len(plan.jobs) <= emulator.header_constant("kWgradJobs")
    extra = max(job["extra_rows"] for job in plan.jobs)
    assert 1 <= plan.lag <= 4
    assert plan.stages >= 1 + plan.lag + extra, "producers and consumers would wait for ever"
    assert plan.strips * plan.segment >= plan.in_w
    assert plan.workers == min(job["workers"] for job in plan.jobs)
    most = max(job["workers"] for job in plan.jobs)
    assert most <= plan.image_groups * plan.in_h * plan.strips
    for job in plan.jobs:
        assert job["planes"] <= emulator.header_constant("kWgradPlanes")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"channels_last": True}, "contiguous layout only"),
        ({"groups": 8}, "of a group = 4: below 8"),
        ({"tf32": False}, "TF32"),
        ({"in_channels": 4}, "below 8"),
        ({"kernel": (40, 40)}, "no chunk fits"),
    ],
)
def test_what_it_cannot_serve_is_refused(change: dict[str, object], reason: str) -> None:
    problem = Problem.of(2, 32, 32, (20, 20), 3, tf32=True, direction="grad_weight")
    answer = sm90_wgrad.consider(replace(problem, **change), H200)  # type: ignore[arg-type]
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


def test_the_workspace_is_bounded_and_stated() -> None:
    problem = Problem.of(64, 64, 128, (128, 256), (3, 5), tf32=True, direction="grad_weight")
    answer = candidate(problem)
    plan = emulator.Plan(answer.params)
    sums = plan.groups * plan.run * plan.tile_n * emulator.ROWS
    blocks = sum(job["workers"] for job in plan.jobs) * plan.channel_blocks
    size = blocks * plan.consumers * sums * 4
    assert size <= 64 * 2**20
    assert any(f"workspace {size / 2**20:.1f} MiB" in note for note in answer.notes)


def test_both_sides_list_the_same_fields_and_forms() -> None:
    problem = Problem.of(2, 16, 16, (9, 9), 3, tf32=True, direction="grad_weight")
    plan = next(sm90_wgrad.options(problem.in_three(), H200))
    names = list(sm90_wgrad.fields(problem.in_three(), *plan))
    assert names == emulator.header_fields()
    text = (CUDA / "sm90_wgrad_launch.cuh").read_text()
    macro = text[text.index("#define UPCONV_WGRAD_FORMS") : text.index("template <typename")]
    found = re.findall(r"X\((\d+), (\d+), (\d+), (\d+), (\d+), (\d+)\)", macro)
    assert tuple(tuple(map(int, form)) for form in found) == FORMS
    for name in ("Jobs", "Planes", "Runs"):
        expected = getattr(sm90_wgrad_chunks, f"MAX_{name.upper()}")
        assert emulator.header_constant(f"kWgrad{name}") == expected


def test_the_cost_rule_is_what_the_measurements_give() -> None:
    fit = script("fit_wgrad")
    constants, spread = fit.fitted(fit.read_rows(fit.MEASURED))
    np.testing.assert_allclose(constants, fit.known(), rtol=0.01)
    assert spread < 0.12


def test_the_plans_chosen_are_among_the_fast_ones_measured() -> None:
    """Of the plans measured for a layer, the one that the rule prefers; the mean loss."""
    fit = script("fit_wgrad")
    losses = []
    rows = fit.read_rows(fit.MEASURED)

    def expected_time(row: dict[str, Any]) -> float:
        return float(fit.blocks(row).split(tuple(row["workers"])).microseconds)

    for _, group in groupby(rows, key=lambda row: (row["case"], row["dtype"])):
        measured = list(group)
        chosen = min(measured, key=expected_time)
        losses.append(chosen["ms"] / min(row["ms"] for row in measured))
    assert np.exp(np.mean(np.log(losses))) < 1.05, losses


def test_jobs_with_fewer_taps_have_fewer_blocks() -> None:
    """Five taps in runs of three: two thirds of the work for the second job of each block."""
    problem = Problem.of(64, 64, 128, (128, 256), (3, 5), tf32=True, direction="grad_weight")
    plan = emulator.Plan(candidate(problem).params)
    taps = [sum(run["count"] for warps in job["run"] for run in warps) for job in plan.jobs]
    workers = [job["workers"] for job in plan.jobs]
    assert max(taps) > min(taps)
    assert [w == max(workers) for w in workers] == [t == max(taps) for t in taps]
    assert sum(workers) * plan.channel_blocks <= 132


def test_the_generated_file_is_what_the_generator_writes() -> None:
    namespace: dict[str, object] = {"__name__": "generator"}
    exec((ROOT / "tools" / "generate_wgmma.py").read_text(), namespace)
    assert (CUDA / "wgmma_registers.cuh").read_text() == namespace["register_text"]()  # type: ignore[operator]
    used = {n for _, n, *_ in FORMS} | set(sm90_patch.TILES) | set(sm90_patch_wgrad.TILES)
    used |= {channels * walk for channels, walk, *_ in sm90_walk.TILES}
    assert used == set(namespace["REGISTER_WIDTHS"])  # type: ignore[call-overload]


SIZES = """
#include <cstdio>
#include "sm90_wgrad_layout.cuh"
using namespace upconv;
template <typename Operand, bool kPairs>
void print() {
  using Layout = wgrad::Shape<Operand, kPairs, 2>;
  for (int n : {32, 48, 64, 128})
    std::printf("%d %d %d %d\\n", Layout::kElement, kPairs, n,
                Layout::kVectors * Layout::vector_step(n));
}
int main() {
  print<Tf32, false>(), print<Tf32, true>(), print<Bf16, false>(), print<Bf16, true>();
  std::printf("%d\\n", wgrad::kHeaderBytes + wgrad::kSlackBytes);
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_both_sides_agree_on_shared_memory(tmp_path: Path) -> None:
    """The kernel computes places from its own constants, the planner from its own."""
    (tmp_path / "sizes.cu").write_text(SIZES)
    command = ["nvcc", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", f"-I{CUDA}"]
    command += ["--expt-relaxed-constexpr", "-o", str(tmp_path / "sizes")]
    subprocess.run([*command, str(tmp_path / "sizes.cu")], check=True, timeout=300)
    *lines, fixed = subprocess.check_output([str(tmp_path / "sizes")], text=True).split("\n")[:-1]
    assert int(fixed) == sm90_wgrad_chunks.FIXED_BYTES
    for line in lines:
        element, pairs, n, unit_bytes = map(int, line.split())
        form = Form(2, n, 1, 1, bool(pairs), element, 2)
        assert sm90_wgrad_chunks.unit_bytes(form) == unit_bytes, line


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("operand", ["tf32", "bf16"])
def test_the_kernel_compiles_without_spills(operand: str, tmp_path: Path) -> None:
    command = ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a"]
    command += ["--expt-relaxed-constexpr", "-Xptxas=-v", "-cubin", "-o", str(tmp_path / "cubin")]
    run = subprocess.run(
        [*command, str(CUDA / f"sm90_wgrad_{operand}.cu")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    assert "serialized" not in report, "the WGMMA pipeline is broken up"
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    assert spills, report
    # Of three consumers with three taps, in the producers' loop of copies for the most part.
    assert max(spills) <= 224, report
