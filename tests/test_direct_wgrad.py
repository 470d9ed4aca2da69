"""Plans of the CUDA-core kernels for the gradients: fields, bounds, choices, compilation."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from params_header import CUDA, ParamsHeader
from test_direct_wgrad_host import compiled_tiles

from upconv.cases import CASES
from upconv.configurations import draw
from upconv.planner import (
    H200,
    Candidate,
    Problem,
    Refusal,
    direct_igrad,
    direct_wgrad,
    gather_wgrad,
    make_plan,
)
from upconv.planner.direct_wgrad import Division

BY_NAME = {case.name: case for case in CASES}
BILINEAR = BY_NAME["fcn_bilinear"].problem(bias=False)


def plan_of(problem: Problem, direction: str, **changes: object) -> str:
    return make_plan(replace(problem, direction=direction, **changes), H200).kernel  # type: ignore[arg-type]


def test_planner_and_header_agree() -> None:
    header = ParamsHeader("direct_grad_params.h")
    way = Division(BILINEAR, 1, 16, 64, 25, 132)
    assert list(direct_wgrad.scalar_fields(way)) == header.fields()
    assert header.constant("kGradPixels") == direct_wgrad.STAGED_PIXELS
    assert header.constant("kGradOutputs") == direct_wgrad.STAGED_OUTPUTS
    assert compiled_tiles("FLOAT") == direct_wgrad.FLOAT_TILES
    assert compiled_tiles("NARROW") == direct_wgrad.NARROW_TILES
    assert compiled_tiles("DOUBLE") == direct_wgrad.DOUBLE_TILES
    text = (CUDA / "direct_grad_launch.cuh").read_text()
    columns = re.search(r"IGRAD_COLUMNS\(X\)(.*)", text)
    assert columns
    assert tuple(map(int, re.findall(r"X\((\d+)\)", columns.group(1)))) == direct_igrad.COLUMNS


@pytest.mark.parametrize("seed", range(3))
def test_every_division_covers_the_work_within_its_bounds(seed: int) -> None:
    for configuration in islice(draw(500 + seed), 40):
        problem = replace(configuration.problem, channels_last=False, direction="grad_weight")
        ways = list(direct_wgrad.divisions(problem, H200))
        assert ways
        for way in ways:
            assert way.units * way.shares >= way.all_units
            assert way.segments * way.segment >= problem.in_size[-1]
            assert way.lanes_x * way.x_tiles >= problem.kernel[-1]
            assert way.lanes_x * way.slots <= 32
            assert way.chunk % way.slots == 0
            reach = (way.chunk - 1) * problem.stride[-1]
            assert reach + (way.lanes_x - 1) * problem.dilation[-1] < direct_wgrad.STAGED_OUTPUTS
            assert way.workspace_bytes <= direct_wgrad.WORKSPACE_BYTES
            assert way.longest_sum <= 2 * direct_wgrad.LONGEST_SUM


def test_depthwise_and_few_channels_are_served() -> None:
    assert plan_of(BILINEAR, "grad_weight", dtype="float64") == direct_wgrad.KERNEL
    dilated = replace(BILINEAR, dilation=(1, 2))
    assert plan_of(dilated, "grad_weight") == direct_wgrad.KERNEL
    assert plan_of(dilated, "grad_input") == direct_igrad.KERNEL
    fsrcnn = BY_NAME["fsrcnn"].problem(bias=False)
    assert plan_of(fsrcnn, "grad_weight") == gather_wgrad.KERNEL  # strict float32, on mma.sync


def test_large_dense_layers_are_left_to_others() -> None:
    for name in ("kb69", "kb57", "dcgan1", "pose_head", "kb61_3d", "kb64_1d"):
        for tf32 in (True, False):
            problem = BY_NAME[name].problem(bias=False, tf32=tf32)
            assert plan_of(problem, "grad_weight") != direct_wgrad.KERNEL
            assert plan_of(problem, "grad_input") != direct_igrad.KERNEL


REFUSALS = {
    "contiguous": replace(BILINEAR, channels_last=True),
    "16-bit": replace(BILINEAR, dtype="bfloat16"),
    "input channels a group": Problem.of(1, 4, 4, (8, 8), 3),
    "rows of the kernel": Problem.of(1, 2, 2, (8, 8), (17, 3), groups=2),
    "taps": Problem.of(1, 2, 2, (8, 80), (3, 33), groups=2),
    "columns apart": Problem.of(1, 2, 2, (8, 80), (3, 9), 1, 0, 0, 20, groups=2),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_the_inputs_gradient_says_why_not(reason: str) -> None:
    answer = direct_igrad.consider(replace(REFUSALS[reason], direction="grad_input"), H200)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


def test_the_weights_gradient_says_why_not() -> None:
    for problem, hardware, reason in (
        (BILINEAR, replace(H200, capability=(7, 5)), "7.5"),
        (BILINEAR, replace(H200, kind="cpu"), "CUDA"),
        (replace(BILINEAR, channels_last=True), H200, "contiguous"),
        (BY_NAME["kb57"].problem(), H200, "workspace"),
        (Problem.of(1, 1, 1, (1 << 14, 1 << 14), 3, groups=1), H200, "2^31"),
    ):
        answer = direct_wgrad.consider(replace(problem, direction="grad_weight"), hardware)
        assert isinstance(answer, Refusal)
        assert reason in answer.reason


def test_the_plan_states_the_workspace() -> None:
    answer = direct_wgrad.consider(replace(BILINEAR, direction="grad_weight"), H200)
    assert isinstance(answer, Candidate)
    assert any("workspace of" in note and "MiB" in note for note in answer.notes)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("architecture", ["80", "86", "89", "90a", "100", "120"])
def test_the_kernels_compile_without_spills_in_the_main_loop(
    architecture: str, tmp_path: Path
) -> None:
    """The instantiations that need most registers. ptxas counts spills of the whole kernel; the few
    bytes that it finds are spilled around the loops."""
    of = "(const __grid_constant__ DirectGradParams);\n"
    source = tmp_path / "kernel.cu"
    source.write_text(
        '#include "direct_igrad.cuh"\n#include "direct_wgrad.cuh"\nnamespace upconv::direct {\n'
        f"template __global__ void direct_wgrad_kernel<float, 8, 9>{of}"
        f"template __global__ void direct_wgrad_kernel<__nv_bfloat16, 8, 9>{of}"
        f"template __global__ void direct_igrad_kernel<double, 16>{of}}}\n"
    )
    flags = ["-std=c++17", "-O3", "-Xptxas", "-v", "-I", str(CUDA), "-cubin"]
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = ["nvcc", target, *flags, "-o", str(tmp_path / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert len(spills) == 3, done.stderr
    assert max(spills) <= 32, done.stderr
