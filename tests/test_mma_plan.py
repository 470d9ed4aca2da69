"""The mma.sync kernel's plan, as far as a machine without a GPU can test it.

The emulator (mma_emulator.py) reads nothing but the integers of the plan, as the kernel does.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import mma_emulator as emulator
import numpy as np
import pytest
import torch
from benchmark_scripts import script
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mma_layers import problems

from upconv.planner import H200, Candidate, Problem, Refusal, make_plan, mma, mma_cost
from upconv.planner import mma_tiling as tiling_module

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "upconv" / "csrc" / "cuda"
CONVOLUTIONS = (
    torch.nn.functional.conv_transpose1d,
    torch.nn.functional.conv_transpose2d,
    torch.nn.functional.conv_transpose3d,
)


def candidate(problem: Problem, multiprocessors: int = 132) -> Candidate:
    answer = mma.consider(problem, replace(H200, multiprocessors=multiprocessors))
    assert isinstance(answer, Candidate), answer
    return answer


def reference(problem: Problem, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The convolution of x, or for the gradient of the input the one that takes x back."""

    def forward(x: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        return CONVOLUTIONS[problem.ndim - 1](
            x,
            w,
            b,
            problem.stride,
            problem.padding,
            problem.output_padding,
            problem.groups,
            problem.dilation,
        )

    if problem.direction == "forward":
        return forward(x, b)
    shape = (problem.batch, problem.in_channels, *problem.in_size)
    start = torch.zeros(shape, dtype=x.dtype, requires_grad=True)
    return torch.autograd.grad(forward(start, None), start, x)[0]


def operands(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shapes of what the kernel reads, and how many biases there are room for."""
    each = problem.out_channels // problem.groups
    w = (problem.in_channels, each, *problem.kernel)
    if problem.direction == "grad_input":
        return (problem.batch, problem.out_channels, *problem.out_size), w, problem.in_channels
    return (problem.batch, problem.in_channels, *problem.in_size), w, problem.out_channels


def check(problem: Problem, record: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x_shape, w_shape, biases = operands(problem)
    x, w = rng.standard_normal(x_shape), rng.standard_normal(w_shape)
    b = rng.standard_normal(biases) * (problem.direction == "forward")
    flat = x.reshape(*x_shape[:2], *[1] * (3 - problem.ndim), *x_shape[2:])
    y = emulator.run(record, flat, w, b)
    expected = reference(problem, *map(torch.from_numpy, (x, w, b)))
    np.testing.assert_allclose(y.reshape(expected.shape), expected.numpy(), rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([1, 8, 132]))
def test_the_emulated_kernel_computes_the_convolution(problem: Problem, sms: int) -> None:
    check(problem, candidate(problem, sms).params)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problems(), st.randoms(use_true_random=False))
def test_every_tiling_computes_the_convolution_not_only_the_best(problem: Problem, rng) -> None:
    every = list(tiling_module.tilings(mma.works(problem), H200))
    tiling = rng.choice([t for t in every if tiling_module.fits(t, H200)])
    check(problem, mma.record(tiling.work, tiling))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems(largest=10**9), st.integers(1, 300))
def test_every_plan_keeps_the_limits_of_the_kernel(problem: Problem, width: int) -> None:
    problem = replace(problem, in_size=(*problem.in_size[:-1], width))
    assume(min(problem.out_size) > 0)
    plan = emulator.Plan(candidate(problem).params)
    assert plan.shared_bytes <= H200.shared_memory
    assert 2 <= plan.warps_m * plan.warps_n <= 8
    assert plan.warp_pixels == 64 or (plan.warp_pixels == 32 and plan.slices == 1)
    assert plan.tile_o * plan.tile_z * plan.tile_y * plan.tile_x <= plan.warp_pixels * plan.warps_m
    assert plan.slice_blocks * plan.plane < 2**16
    assert plan.row_lanes in (1, 2, 4, 8, 16, 32)
    assert plan.channel_pitch * (4 if plan.slot_channels == 4 else 2) % 64 == 16
    for table in ("kinds", "rows", "phases", "steps", "stages", "taps"):
        assert plan.field[table] <= emulator.header_constant(f"kMmaMax{table.capitalize()}")
    covered = (
        plan.tiles_z * plan.tile_z * plan.out_step_z,
        plan.tiles_y * plan.tile_y * plan.out_step_y,
        plan.tiles_x * plan.tile_x * plan.out_step_x,
    )
    assert all(c >= o for c, o in zip(covered, (plan.out_d, plan.out_h, plan.out_w), strict=True))


@pytest.mark.parametrize("stride", [(5, 5), (8, 16), (16, 8), (31, 1), (1, 40)])
@pytest.mark.parametrize("out_channels", [5, 64, 192])
def test_many_phases_fit_the_tables_or_are_refused(
    stride: tuple[int, int], out_channels: int
) -> None:
    problem = Problem.of(2, 16, out_channels, (9, 9), 8, stride, dtype="bfloat16")
    answer = mma.consider(problem, H200)
    if isinstance(answer, Refusal):
        assert "too many taps or phases" in answer.reason
        return
    plan = emulator.Plan(answer.params)
    for table in ("kinds", "rows", "phases", "steps", "stages", "taps"):
        assert plan.field[table] <= emulator.header_constant(f"kMmaMax{table.capitalize()}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"groups": 8}, "2 in_channels a group"),
        ({"out_channels": 3}, "3 out_channels a group"),
        ({"channels_last": True}, "contiguous layout"),
        ({"batch": 0}, "nothing to compute"),
        ({"in_size": (2**16, 2**16)}, "2^31 pixels"),
        ({"tf32": False, "in_channels": 240}, "2160 products an output"),
    ],
)
def test_refusals_say_why(change: dict[str, object], words: str) -> None:
    problem = replace(Problem.of(2, 16, 16, (8, 8), 3, tf32=True), **change)  # type: ignore[arg-type]
    answer = mma.consider(problem, H200)
    assert isinstance(answer, Refusal)
    assert words in answer.reason


def test_older_gpus_are_refused_by_their_capability() -> None:
    answer = mma.consider(Problem.of(2, 16, 16, (8, 8), 3), replace(H200, capability=(7, 5)))
    assert isinstance(answer, Refusal)
    assert "7.5" in answer.reason


@pytest.mark.parametrize(("capability", "shared"), [((8, 0), 163), ((8, 9), 99), ((12, 0), 99)])
def test_other_gpus_get_tiles_that_fit_their_shared_memory(
    capability: tuple[int, int], shared: int
) -> None:
    gpu = replace(H200, capability=capability, shared_memory=shared * 1024)
    for problem in (
        Problem.of(8, 48, 48, (64, 64, 64), 3, tf32=True),
        Problem.of(16, 64, 64, (64, 64), 4, 2, 1, dtype="bfloat16"),
    ):
        answer = make_plan(problem, gpu, forced=mma.KERNEL)
        assert answer.kernel == mma.KERNEL
        assert emulator.Plan(answer.chosen.params).shared_bytes <= shared * 1024


def test_planner_and_header_agree_on_fields_and_limits() -> None:
    works = mma.works(Problem.of(1, 8, 8, (4, 4), 3, tf32=True))
    tiling = next(tiling_module.tilings(works, H200))
    assert list(tiling.fields()) == emulator.header_fields()
    for name in ("Kinds", "Rows", "Phases", "Steps", "Stages", "Taps"):
        limit = getattr(tiling_module, f"MAX_{name.upper()}")
        assert emulator.header_constant(f"kMmaMax{name}") == limit
    assert emulator.header_constant("kMmaDepth") == tiling_module.DEPTH


def test_the_cost_rule_is_what_the_measurements_give() -> None:
    fit = script("fit_mma")
    tilings = fit.read(*fit.MEASURED)
    constants, spread = fit.fitted(fit.near(tilings))
    assert constants == pytest.approx(mma_cost.CYCLES, rel=0.01)
    assert spread < 0.09
    lost = fit.lost(tilings)
    assert sum(lost.values()) / len(lost) < 0.025
    waiting = [part for key, part in lost.items() if key[0].endswith(".gz") and "bfloat16" in key]
    assert len(waiting) == 3
    assert max(waiting) < 0.055, "layers that mostly wait, which these forms are for"


def test_measured_rows_are_what_the_fit_reads(tmp_path: Path) -> None:
    measure, fit = script("measure_mma"), script("fit_mma")
    problem = next(case for case in fit.CASES if case.name == "nnunet_3d").problem(tf32=True)
    tilings = measure.chosen(problem, H200)
    assert len({(t.warps_m, t.layout.warps_n) for t in tilings}) >= 3
    path = tmp_path / "rows.jsonl"
    called = {"case": "nnunet_3d", "dtype": "float32", "tf32": True, "ms": 1.0}
    for tiling in (tilings[0], next(t for t in tilings if t.warp_pixels == 32)):
        path.write_text(json.dumps(called | measure.row_of(tiling, H200)))
        (measured,) = fit.read(path)
        assert measured.work == tiling.block
        expected = (tiling.cycles - mma_cost.START_CYCLES) / mma_cost.CLOCK_MHZ / 1e3
        assert measured.expected == pytest.approx(expected, rel=1e-3)


def test_the_planner_takes_it_where_pytorch_is_slow_and_leaves_the_rest() -> None:
    grouped = Problem.of(
        16, 32, 64, (128, 256), (3, 5), (2, 3), (1, 2), 0, (2, 1), 8, dtype="bfloat16"
    )
    dilated = Problem.of(32, 512, 256, (33, 33), 3, 1, 2, 0, 2, dtype="bfloat16")
    assert make_plan(grouped, H200).kernel == mma.KERNEL
    assert make_plan(dilated, H200).kernel == "aten"  # 0.21 ms, 0.43 with mma.sync


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize(
    ("architecture", "operands"),
    [
        ("80", ("tf32", "bf16", "split")),
        ("86", ("tf32", "bf16")),
        ("89", ("bf16",)),
        ("90a", ("tf32", "bf16", "fp16", "split")),
        ("100", ("tf32",)),
        ("120", ("bf16",)),
    ],
)
def test_the_kernel_compiles_without_spills(
    architecture: str, operands: tuple[str, ...], tmp_path: Path
) -> None:
    """Nothing is spilled but on the GPUs since compute capability 10.0, where the compiler wants
    more registers for the same source: some 150 words around the main loop."""
    source = tmp_path / "kernel.cu"
    source.write_text("".join(f'#include "mma_{name}.cu"\n' for name in operands))
    command = [
        "nvcc",
        "-std=c++17",
        "-O3",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
        "--expt-relaxed-constexpr",
        "--split-compile=0",
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
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    assert len(spills) == 3 * len(operands), report
    assert max(spills) <= (704 if architecture in ("100", "120") else 0), report
