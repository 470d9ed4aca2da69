"""Plans of the kernels for the gradients of depthwise layers: fields, bounds, choices, refusals."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from params_header import CUDA, ParamsHeader
from test_depthwise_host import PLANNERS, compiled_forms, drawn

from upconv.planner import (
    H200,
    Candidate,
    Problem,
    Refusal,
    depthwise,
    depthwise_igrad,
    depthwise_wgrad,
    make_plan,
)

BILINEAR = Problem.of(8, 21, 21, (64, 64), 16, 8, 4, groups=21)


def test_planners_and_header_agree() -> None:
    header = ParamsHeader("depthwise_params.h")
    for planner in PLANNERS.values():
        way = next(iter(planner.divisions(BILINEAR, H200)))
        assert list(planner.scalar_fields(way)) == header.fields()
    assert header.constant("kDepthwiseColumns") == depthwise.COLUMNS
    assert header.constant("kDepthwiseThreads") == depthwise.MOST_THREADS
    assert header.constant("kDepthwiseRows") == depthwise_igrad.ROWS
    assert header.constant("kDepthwisePad") == depthwise.PAD
    assert header.constant("kDepthwiseMostPad") == depthwise.MOST_PAD
    assert compiled_forms("IGRAD") == tuple(depthwise_igrad.REGISTERS)
    assert compiled_forms("WGRAD") == depthwise_wgrad.FORMS
    ring = (CUDA / "depthwise_ring.cuh").read_text()
    for name, planner in (("Igrad", depthwise_igrad), ("Wgrad", depthwise_wgrad)):
        found = re.search(rf"k{name}Stages = sizeof\(T\) == 4 \? (\d+) : (\d+)", ring)
        assert found
        assert {4: int(found.group(1)), 2: int(found.group(2))} == planner.STAGES


@pytest.mark.parametrize("seed", range(3))
def test_every_division_covers_the_work_within_its_bounds(seed: int) -> None:
    for problem in islice(drawn(100 + seed), 60):
        if depthwise.legality(problem, H200) is not None:
            continue
        layer = depthwise.Layer(problem)
        ways = list(PLANNERS[problem.direction].divisions(problem, H200))
        assert ways, problem
        for way in ways:
            assert way.threads <= depthwise.MOST_THREADS
            assert way.shared_bytes <= H200.shared_memory
            if problem.direction == "grad_input":
                assert way.tile * way.tiles_x >= layer.in_size[2]
                assert way.strip * way.strips >= layer.in_size[1]
                assert (layer.reach_y, layer.reach_x) in depthwise_igrad.REGISTERS
                continue
            assert way.tile * way.tiles_x >= layer.out_size[2]
            assert way.lanes % (layer.period // depthwise.COLUMNS) == 0
            assert way.rows * way.row_groups >= layer.stride[1]
            assert way.each * way.shares * way.teams >= way.units
            assert way.workspace_bytes <= depthwise_wgrad.WORKSPACE_BYTES
            assert way.longest_sum <= depthwise_wgrad.LONGEST_SUM
            assert (way.rows, layer.reach_y, layer.reach_x) in depthwise_wgrad.FORMS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tf32", [True, False])
def test_depthwise_layers_are_served(dtype: str, tf32: bool) -> None:
    for problem in (
        BILINEAR,
        Problem.of(16, 256, 256, (32, 32), 4, 2, 1, groups=256),
        Problem.of(8, 21, 21, (16, 16), 64, 32, 16, groups=21),
        Problem.of(2, 64, 64, (16, 32, 32), 4, 2, 1, groups=64),
    ):
        for direction, planner in PLANNERS.items():
            plan = make_plan(replace(problem, dtype=dtype, tf32=tf32, direction=direction), H200)
            assert plan.kernel == planner.KERNEL
            assert plan.chosen.with_bias == (direction == "grad_weight")


REFUSALS = {
    "CUDA": (BILINEAR, replace(H200, kind="cpu")),
    "7.5": (BILINEAR, replace(H200, capability=(7, 5))),
    "float64": (replace(BILINEAR, dtype="float64"), H200),
    "contiguous": (replace(BILINEAR, channels_last=True), H200),
    "nothing": (replace(BILINEAR, batch=0), H200),
    "one channel": (replace(BILINEAR, out_channels=42), H200),
    "needs a stride": (Problem.of(1, 4, 4, (8, 8), 3, groups=4), H200),
    "dilation": (replace(BILINEAR, dilation=(2, 1)), H200),
    "2 times the stride": (Problem.of(1, 4, 4, (8, 8), 5, 2, groups=4), H200),
    "too wide": (Problem.of(1, 4, 4, (8, 8), 3, 2049, groups=4), H200),
    "2^30 rows": (Problem.of(1 << 14, 1 << 10, 1 << 10, (64, 1), 2, 2, groups=1 << 10), H200),
    "as many pixels": (Problem.of(1, 1, 1, (1 << 29,), 2, 2), H200),
    "the weight": (Problem.of(1, 1 << 20, 1 << 20, (1, 1), 64, 32, groups=1 << 20), H200),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_both_say_why_not(reason: str) -> None:
    problem, hardware = REFUSALS[reason]
    for direction, planner in PLANNERS.items():
        answer = planner.consider(replace(problem, direction=direction), hardware)
        assert isinstance(answer, Refusal)
        assert reason in answer.reason


def test_what_no_thread_block_has_room_for() -> None:
    large = Problem.of(1, 1, 1, (2, 2, 2), (64, 64, 64), (32, 32, 32), direction="grad_input")
    answer = depthwise_igrad.consider(large, H200)
    assert isinstance(answer, Refusal)
    assert "shared memory" in answer.reason
    high = Problem.of(1, 1, 1, (4, 4), 512, 256, direction="grad_weight")
    answer = depthwise_wgrad.consider(high, H200)
    assert isinstance(answer, Refusal)
    assert "no room" in answer.reason


def test_tensors_of_more_than_2_31_elements_are_served() -> None:
    """Only rows and pixels of a row are numbered by 32 bits."""
    problem = Problem.of(64, 512, 512, (256, 256), 4, 2, 1, groups=512)
    for direction, planner in PLANNERS.items():
        answer = planner.consider(replace(problem, direction=direction), H200)
        assert isinstance(answer, Candidate)


def test_the_bias_of_a_volume_is_added_where_every_plane_meets_a_tap() -> None:
    volume = Problem.of(1, 2, 2, (4, 4, 4), 2, 2, groups=2, direction="grad_weight")
    for problem, added in (
        (volume, True),
        (replace(volume, bias=False), False),
        (replace(volume, stride=(3, 2, 2)), False),
        (replace(volume, dilation=(2, 1, 1)), False),
    ):
        answer = depthwise_wgrad.consider(problem, H200)
        assert isinstance(answer, Candidate)
        assert answer.with_bias == added


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("architecture", ["80", "90a", "120"])
def test_the_kernels_compile_without_spills(architecture: str, tmp_path: Path) -> None:
    """The registers that the planner counts on are those of Hopper."""
    of = "(const __grid_constant__ DepthwiseParams);\n"
    source = tmp_path / "kernel.cu"
    source.write_text(
        '#include "depthwise_igrad.cuh"\n#include "depthwise_wgrad.cuh"\n'
        f"namespace upconv::direct {{\n"
        f"template __global__ void depthwise_igrad_kernel<float, 2, 2>{of}"
        f"template __global__ void depthwise_igrad_kernel<__nv_bfloat16, 2, 2>{of}"
        f"template __global__ void depthwise_wgrad_kernel<float, 2, 2, 2>{of}"
        f"template __global__ void depthwise_wgrad_kernel<__nv_bfloat16, 2, 2, 2>{of}}}\n"
    )
    flags = ["-std=c++17", "-O3", "-Xptxas", "-v", "-I", str(CUDA), "-cubin"]
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = ["nvcc", target, *flags, "-o", str(tmp_path / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert len(spills) == 4, done.stderr
    assert max(spills) == 0, done.stderr
