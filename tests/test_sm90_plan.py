"""The Hopper kernel's plan, as far as a machine without a GPU can test it.

The emulator (sm90_emulator.py) reads nothing but the integers of the plan, as the kernel does.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sm90_emulator as emulator
import sm90_pipeline as pipeline
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from upconv.planner import (
    H200,
    Candidate,
    Problem,
    Refusal,
    make_plan,
    sm90,
    sm90_cost,
    sm90_tiling,
)
from upconv.planner.sm90_tiling import FIXED_BYTES, STAGE_BYTES, TILES

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "upconv" / "csrc" / "cuda"


def candidate(problem: Problem, multiprocessors: int = 132) -> Candidate:
    answer = sm90.consider(problem, replace(H200, multiprocessors=multiprocessors))
    assert isinstance(answer, Candidate), answer
    return answer


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    pair = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * 2))  # noqa: E731
    stride, dilation = pair(1, 4), pair(1, 3)
    channels_last = draw(st.booleans())
    step = 8 if channels_last else 1
    problem = Problem(
        batch=draw(st.integers(1, 4)),
        in_channels=draw(st.integers(8 // step, 40 // step)) * step,
        out_channels=draw(st.integers(8 // step, 136 // step)) * step,
        in_size=pair(1, 9),
        kernel=pair(1, 4),
        stride=stride,
        padding=pair(0, 2),
        # PyTorch answers channels_last with another layout where it reaches the stride.
        output_padding=tuple(
            draw(st.integers(0, (s if channels_last else max(s, d)) - 1))
            for s, d in zip(stride, dilation, strict=True)
        ),
        dilation=dilation,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        channels_last=channels_last,
        tf32=True,
    )
    assume(min(problem.out_size) > 0)
    return problem


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([1, 8, 132]))
def test_the_emulated_kernel_computes_the_convolution(problem: Problem, sms: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((problem.batch, problem.in_channels, *problem.in_size))
    w = rng.standard_normal((problem.in_channels, problem.out_channels, *problem.kernel))
    b = rng.standard_normal(problem.out_channels)
    y = emulator.run(candidate(problem, sms).params, x, w, b)
    expected = torch.nn.functional.conv_transpose2d(
        *map(torch.from_numpy, (x, w, b)),
        problem.stride,
        problem.padding,
        problem.output_padding,
        1,
        problem.dilation,
    )
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-10, atol=1e-10)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([1, 2, 132]), st.randoms(use_true_random=False))
def test_no_role_of_the_kernel_waits_for_ever(
    problem: Problem, sms: int, random: random.Random
) -> None:
    """Any tiling, not only the chosen one, in any order of events."""
    hardware = replace(H200, multiprocessors=sms)
    choices = []
    for shape in sm90.shapes(problem):
        by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in range(1, 5)}
        for tiling in sm90_tiling.tilings(shape, by_blocks, hardware):
            choices.append((shape, by_blocks[tiling.blocks], tiling))
    for shape, job_list, tiling in random.sample(choices, min(len(choices), 3)):
        assert job_list is not None
        pipeline.play(sm90.record(shape, job_list, tiling), sms, random.randrange(1 << 30))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems(), st.integers(1, 300), st.integers(1, 300))
def test_every_plan_keeps_the_limits_of_the_kernel(problem: Problem, h: int, w: int) -> None:
    problem = replace(problem, in_size=(h, w))
    assume(min(problem.out_size) > 0)
    plan = emulator.Plan(candidate(problem).params)
    emulator.check_vectors(plan)
    slot = plan.slice_blocks * plan.plane * 16
    raw = plan.raw_chunks * plan.raw_bytes if plan.copy == 3 else sm90_tiling.GATHER_BYTES
    assert FIXED_BYTES + raw + plan.stages * STAGE_BYTES + plan.slots * slot <= 227 * 1024
    assert (plan.tile_n, plan.job_blocks) in TILES
    assert plan.slice_blocks in (2, 4, 8)
    assert 2 <= plan.slots <= 16
    assert 3 <= plan.stages <= 16, "two steps stay in flight behind the newest one"
    assert plan.pixels <= sm90_tiling.MAX_PIXELS
    assert plan.plane >= plan.pixels
    for table, most in (("pairs", "kMaxPairs"), ("kinds", "kMaxKinds"), ("jobs", "kMaxJobs")):
        assert len(getattr(plan, table)) <= emulator.header_constant(most)
    assert all(kind["range"][0] % 4 == 0 for kind in plan.kinds)
    covered = plan.tiles_y * plan.tile_h * plan.out_step_y, plan.tiles_x * plan.tile_w
    assert covered[0] >= plan.out_h
    assert covered[1] * plan.out_step_x >= plan.out_w


@pytest.mark.parametrize("stride", [(5, 5), (5, 6), (6, 5), (6, 6), (8, 4), (4, 8), (31, 1)])
@pytest.mark.parametrize("out_channels", [16, 64, 192])
def test_many_phases_fit_the_tables_or_are_refused(
    stride: tuple[int, int], out_channels: int
) -> None:
    problem = Problem.of(2, 16, out_channels, (9, 9), 8, stride, dtype="bfloat16")
    answer = sm90.consider(problem, H200)
    if isinstance(answer, Refusal):
        assert "too many taps or phases" in answer.reason
        return
    plan = emulator.Plan(answer.params)
    for table, most in (("pairs", "kMaxPairs"), ("kinds", "kMaxKinds"), ("jobs", "kMaxJobs")):
        assert len(getattr(plan, table)) <= emulator.header_constant(most)


def test_one_dimension_is_a_single_row() -> None:
    flat = Problem.of(2, 16, 24, (40,), 5, 2, 1, 1, dtype="bfloat16")
    plan = emulator.Plan(candidate(flat).params)
    assert (plan.in_h, plan.in_w, plan.out_h, plan.out_w) == (1, 40, 1, *flat.out_size)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"tf32": False}, "fp32_precision"),
        ({"groups": 2}, "groups = 2"),
        ({"in_channels": 4}, "in_channels = 4"),
        ({"out_channels": 4}, "out_channels = 4"),
        ({"in_channels": 10, "channels_last": True}, "multiples of 4"),
        ({"batch": 0}, "nothing to compute"),
        (
            {"channels_last": True, "output_padding": (1, 0), "dilation": (2, 2)},
            "output_padding >= stride",
        ),
    ],
)
def test_refusals_say_why(change: dict[str, object], words: str) -> None:
    problem = replace(Problem.of(2, 16, 16, (8, 8), 3, tf32=True), **change)  # type: ignore[arg-type]
    answer = sm90.consider(problem, H200)
    assert isinstance(answer, Refusal)
    assert words in answer.reason


def test_other_gpus_are_refused_by_their_capability() -> None:
    problem = Problem.of(2, 16, 16, (8, 8), 3, tf32=True)
    answer = sm90.consider(problem, replace(H200, capability=(8, 9)))
    assert isinstance(answer, Refusal)
    assert "8.9" in answer.reason


def test_a_forced_plan_takes_the_kernel_and_a_free_one_weighs_it_against_pytorch() -> None:
    small = Problem.of(1, 8, 8, (4, 4), 3, tf32=True, channels_last=True)
    assert make_plan(small, H200, forced=sm90.KERNEL).kernel == sm90.KERNEL
    free = make_plan(small, H200)
    assert free.kernel == "aten"
    assert any(r.kernel == sm90.KERNEL and "slower" in r.reason for r in free.refused)
    big = Problem.of(64, 64, 128, (128, 256), (3, 5), tf32=True)
    assert make_plan(big, H200).kernel == sm90.KERNEL


def test_planner_and_header_agree_on_fields_and_limits() -> None:
    problem = sm90.flat(Problem.of(1, 8, 8, (4, 4), 3, tf32=True))
    shape = sm90.shapes(problem)[0]
    by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in range(1, 5)}
    tiling = next(sm90_tiling.tilings(shape, by_blocks, H200))
    assert list(tiling.fields(shape)) == emulator.header_fields()
    for name, value in {
        "kMaxKinds": sm90_tiling.MAX_KINDS,
        "kMaxPairs": sm90_tiling.MAX_PAIRS,
        "kMaxJobs": sm90_tiling.MAX_JOBS,
        "kMaxFolds": sm90_tiling.MAX_FOLDS,
        "kMaxBlocks": sm90_tiling.MAX_BLOCKS,
        "kStepPairs": sm90_tiling.STEP_PAIRS,
    }.items():
        assert emulator.header_constant(name) == value


def test_planner_and_kernel_agree_on_the_tiles() -> None:
    listed = re.search(
        r"define UPCONV_SM90_TILES\(X\)(.*?)\n\n", (CUDA / "sm90_launch.cuh").read_text(), re.DOTALL
    )
    assert listed
    pairs = re.findall(r"X\((\d+), (\d+)\)", listed.group(1))
    assert {(int(n), int(blocks)) for n, blocks in pairs} == set(TILES)


def test_the_generated_header_is_what_its_generator_writes() -> None:
    namespace: dict[str, object] = {"__name__": "generator"}
    exec((ROOT / "tools" / "generate_wgmma.py").read_text(), namespace)
    assert (CUDA / "wgmma.cuh").read_text() == namespace["text"]()  # type: ignore[operator]
    widths = {n for n, _ in TILES}
    assert widths == set(namespace["WIDTHS"])  # type: ignore[call-overload]


def test_the_cost_rule_is_what_the_measurements_give() -> None:
    namespace: dict[str, Any] = {
        "__name__": "fit",
        "__file__": str(ROOT / "benchmarks" / "fit_sm90.py"),
    }
    exec((ROOT / "benchmarks" / "fit_sm90.py").read_text(), namespace)
    constants, spread = namespace["fitted"](namespace["read"](namespace["MEASURED"]))
    assert constants == pytest.approx(sm90_cost.CYCLES, rel=0.01)
    assert spread < 0.1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("operand", ["Tf32", "Bf16"])
def test_the_kernel_compiles_without_spills_in_the_main_loop(operand: str, tmp_path: Path) -> None:
    """The widest tile of each operand. ptxas counts spills of the whole kernel; the few bytes that
    are allowed lie in the set-up and the epilogue, once a unit of tens of thousands of cycles."""
    source = tmp_path / "kernel.cu"
    source.write_text(
        '#include "sm90_launch.cuh"\nnamespace upconv {\n'
        f"template __global__ void sm90_wgmma_fprop<{operand}, 256, 1>"
        "(const __grid_constant__ Sm90Params, const __grid_constant__ CUtensorMap);\n}\n"
    )
    command = [
        "nvcc",
        "-std=c++17",
        "-O3",
        "-gencode=arch=compute_90a,code=sm_90a",
        "--expt-relaxed-constexpr",
        f"-I{CUDA}",
        "-Xptxas=-v",
        "-cubin",
        "-o",
        str(tmp_path / "kernel.cubin"),
        str(source),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    assert "serialized" not in report, "the WGMMA pipeline is broken up"
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    assert spills, report
    assert max(spills) <= 128, report
