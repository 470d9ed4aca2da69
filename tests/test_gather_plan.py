"""Plans of the mma.sync kernels for the gradients: fields, jobs, bounds, choices, compilation."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import fields, replace
from itertools import islice, product
from pathlib import Path

import pytest
from params_header import CUDA, ParamsHeader

from upconv.cases import CASES
from upconv.configurations import draw
from upconv.planner import H200, Candidate, Problem, Refusal, gather, make_plan
from upconv.planner import gather_igrad as igrad
from upconv.planner import gather_wgrad as wgrad
from upconv.planner.operands import SPLIT
from upconv.planner.problem import three

BY_NAME = {case.name: case for case in CASES}
FSRCNN = BY_NAME["fsrcnn"].problem(bias=False, tf32=True)
WEIGHT = replace(FSRCNN, direction="grad_weight")
INPUT = replace(FSRCNN, direction="grad_input")


def kernel_of(name: str, direction: str, **changes: object) -> str:
    problem = BY_NAME[name].problem(bias=False, tf32=True)
    return make_plan(replace(problem, direction=direction, **changes), H200).kernel  # type: ignore[arg-type]


def drawn(seed: int, count: int) -> list[Problem]:
    found = [configuration.problem for configuration in islice(draw(seed), count)]
    problems = [replace(p, channels_last=False, tf32=True, bias=False) for p in found]
    legal = [p for p in problems if gather.legality(p, H200) is None]
    assert len(legal) > count // 2
    return legal


def test_planner_and_header_agree() -> None:
    header = ParamsHeader("gather_params.h")
    scalars, jobs = header.text.split("#define UPCONV_GATHER_JOB_FIELDS(X)")
    names = re.findall(r"^\s+X\((\w+)\)", scalars, re.MULTILINE)
    weight = next(wgrad.divisions(WEIGHT, H200))
    assert list(wgrad.scalar_fields(weight)) == names
    assert list(igrad.scalar_fields(next(igrad.divisions(INPUT, H200)))) == names
    assert [field.name for field in fields(gather.Job)] == re.findall(r"\bX\((\w+)\)", jobs)
    assert header.constant("kGatherJobs") == gather.MOST_JOBS
    assert header.constant("kGatherPixels") == igrad.PIXELS
    tiles = re.search(r"UPCONV_GATHER_WGRAD_TILES\(X\)((?:.|\\\n)*?)\n#", header.text)
    assert tiles
    found = re.findall(r"X\((\d+), (\d+)\)", tiles.group(1))
    assert tuple((int(m), int(n)) for m, n in found) == wgrad.TILES
    columns = re.search(r"UPCONV_GATHER_IGRAD_TILES\(X\)(.*)", header.text)
    assert columns
    assert tuple(map(int, re.findall(r"X\((\d+)\)", columns.group(1)))) == igrad.TILES


def products(problem: Problem, way: wgrad.Division) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """For each tap of depth and height the pairs (input row, output row) that its job adds up,
    numbered through all planes; rows outside the tensors left out, as they are zeros."""
    deep, high, _ = three(problem.in_size, 1)
    out_deep, out_high, _ = three(problem.out_size, 1)
    stride = three(problem.stride, 1)
    classes = way.shape.classes
    step = (1, 1) if way.shape.by_input else (classes[0][0].step, classes[1][0].step)
    gy, x = way.gy_box, way.x_box
    result: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for job in way.jobs:
        pairs = product(range(job.taps_z), range(job.taps_y))
        for (jz, jy), qz in product(pairs, range(job.count_z if job.units else 0)):
            met = result.setdefault((job.tap_z + jz * step[0], job.tap_y + jy * step[1]), set())
            for first, r in product(range(0, job.count_y, way.rows), range(way.rows)):
                a_row = (jy if way.shape.by_input else 0) * gy.tap_rows + r * gy.row_advance
                b_row = r if way.shape.by_input else (job.taps_y - 1 - jy) * x.tap_rows + r
                assert a_row < gy.rows
                assert b_row < x.rows
                oz = qz * stride[0] + job.gy_z + (jz if way.shape.by_input else 0) * gy.plane_step
                oy = first * stride[1] + job.gy_y + a_row * gy.row_step
                iz = qz + job.x_z + (0 if way.shape.by_input else jz) * x.plane_step
                iy = first + job.x_y + b_row
                if 0 <= oz < out_deep and 0 <= oy < out_high and 0 <= iz < deep and 0 <= iy < high:
                    met.add((iz * high + iy, oz * out_high + oy))
    return result


@pytest.mark.parametrize("seed", range(3))
def test_every_job_meets_the_rows_of_its_taps(seed: int) -> None:
    for problem in drawn(500 + seed, 25):
        problem = replace(problem, direction="grad_weight")
        (kz, ky, _), (sz, sy, _) = three(problem.kernel, 1), three(problem.stride, 1)
        (pz, py, _), (dz, dy, _) = three(problem.padding, 0), three(problem.dilation, 1)
        (deep, high, _), (od, oh, _) = three(problem.in_size, 1), three(problem.out_size, 1)
        expected = {}
        for z, y in product(range(kz), range(ky)):
            pairs = set()
            for iz, iy in product(range(deep), range(high)):
                oz, oy = iz * sz - pz + z * dz, iy * sy - py + y * dy
                if 0 <= oz < od and 0 <= oy < oh:
                    pairs.add((iz * high + iy, oz * oh + oy))
            expected[z, y] = pairs
        ways = list(wgrad.divisions(problem, H200))
        assert ways, problem
        for way in ways[:: max(1, len(ways) // 4)]:
            found = products(problem, way)
            assert {tap: found.get(tap, set()) for tap in expected} == expected, way


@pytest.mark.parametrize("seed", range(3))
def test_every_division_stays_within_its_bounds(seed: int) -> None:
    for problem in drawn(600 + seed, 25):
        for way in wgrad.divisions(replace(problem, direction="grad_weight"), H200):
            shape, taps = way.shape, way.shape.taps_z * way.shape.taps_y
            together = max(job.taps_z * job.taps_y for job in way.jobs)
            rows = shape.out_block * shape.tap_block * (taps if shape.by_input else 1)
            columns = shape.in_block * (1 if shape.by_input else together)
            assert rows <= 16 * shape.tile[0] * shape.warps[0]
            assert columns <= 8 * shape.tile[1] * shape.warps[1]
            assert way.threads <= (128 if shape.large else 256)
            assert way.shared_bytes <= H200.shared_memory
            assert way.workspace_bytes <= wgrad.WORKSPACE_BYTES
            assert len(way.jobs) <= gather.MOST_JOBS
            assert all(1 <= job.shares <= max(1, job.units) for job in way.jobs)
            assert sum(job.shares for job in way.jobs) * shape.parts == way.blocks
        for way in igrad.divisions(replace(problem, direction="grad_input"), H200):
            assert way.in_block % (8 * way.tile) == 0
            assert way.in_block >= problem.in_channels // problem.groups
            assert way.columns % 16 == 0
            assert way.shared_bytes <= H200.shared_memory


def test_rows_of_pixels_are_found_by_a_product() -> None:
    """As the kernel divides: by the upper half of a product with the rounded inverse."""
    for columns in range(16, 513, 16):
        inverse = -(-(1 << 32) // columns)
        assert all(pixel * inverse >> 32 == pixel // columns for pixel in range(4096))


def test_few_channels_are_served() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        assert kernel_of("fsrcnn", "grad_weight", dtype=dtype) == wgrad.KERNEL
        assert kernel_of("fsrcnn", "grad_input", dtype=dtype) == igrad.KERNEL
        assert kernel_of("kb75", "grad_weight", dtype=dtype) == wgrad.KERNEL


def test_large_dense_layers_are_left_to_others() -> None:
    for name, dtype in product(("kb69", "kb57", "pose_head", "kb61_3d"), ("float32", "bfloat16")):
        assert kernel_of(name, "grad_weight", dtype=dtype) != wgrad.KERNEL
        assert kernel_of(name, "grad_input", dtype=dtype) != igrad.KERNEL
    plan = make_plan(
        replace(BY_NAME["kb69"].problem(bias=False, tf32=True), direction="grad_weight"), H200
    )
    reasons = {refusal.kernel: refusal.reason for refusal in plan.refused}
    assert "slower here" in reasons[wgrad.KERNEL]


REFUSALS = {
    "CUDA": (FSRCNN, replace(H200, kind="cpu")),
    "7.5": (FSRCNN, replace(H200, capability=(7, 5))),
    "float64": (replace(FSRCNN, dtype="float64"), H200),
    "contiguous": (replace(FSRCNN, channels_last=True), H200),
    "nothing": (replace(FSRCNN, batch=0), H200),
    "2^31": (Problem.of(1, 8, 1, (1 << 14, 1 << 14), 3, tf32=True), H200),
    "2^30": (Problem.of(1 << 15, 1, 1, (1 << 15,), 3, tf32=True), H200),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_both_say_why_not(reason: str) -> None:
    problem, hardware = REFUSALS[reason]
    for module, direction in ((wgrad, "grad_weight"), (igrad, "grad_input")):
        answer = module.consider(replace(problem, direction=direction), hardware)
        assert isinstance(answer, Refusal)
        assert reason in answer.reason


def test_the_gradient_of_the_weight_alone_takes_float32_as_it_is() -> None:
    strict = replace(FSRCNN, tf32=False)
    refusal = igrad.consider(replace(strict, direction="grad_input"), H200)
    assert isinstance(refusal, Refusal)
    assert "not allowed" in refusal.reason
    plan = wgrad.consider(replace(strict, direction="grad_weight"), H200)
    rounded = wgrad.consider(replace(FSRCNN, direction="grad_weight"), H200)
    assert isinstance(plan, Candidate)
    assert isinstance(rounded, Candidate)
    assert plan.params[0] == SPLIT
    assert plan.microseconds > rounded.microseconds


def test_weights_that_do_not_fit_are_refused() -> None:
    dense = Problem.of(1, 64, 64, (32, 32), 5, tf32=True, direction="grad_input")
    answer = igrad.consider(dense, H200)
    assert isinstance(answer, Refusal)
    assert "KiB of shared memory" in answer.reason


def test_the_plan_states_the_workspace() -> None:
    answer = wgrad.consider(WEIGHT, H200)
    assert isinstance(answer, Candidate)
    assert any("workspace of" in note and "MiB" in note for note in answer.notes)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("architecture", ["80", "90a", "120"])
def test_the_kernels_compile_without_spills_in_the_main_loop(
    architecture: str, tmp_path: Path
) -> None:
    """The instantiations that need most registers. ptxas counts spills of the whole kernel; the few
    bytes that it finds are spilled around the loops."""
    of = "(const __grid_constant__ GatherParams);\n"
    source = tmp_path / "kernel.cu"
    source.write_text(
        '#include "gather_igrad.cuh"\n#include "gather_wgrad.cuh"\nnamespace upconv::gather {\n'
        f"template __global__ void gather_wgrad_kernel<Tf32, 3, 7>{of}"
        f"template __global__ void gather_wgrad_kernel<Bf16, 5, 3>{of}"
        f"template __global__ void gather_igrad_kernel<Bf16, 4>{of}"
        f"template __global__ void gather_igrad_kernel<Bf16, 7>{of}}}\n"
    )
    flags = ["-std=c++17", "-O3", "-Xptxas", "-v", "-I", str(CUDA), "-cubin"]
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = ["nvcc", target, *flags, "-o", str(tmp_path / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert len(spills) == 4, done.stderr
    assert max(spills) <= 96, done.stderr
