"""The CUDA-core kernel's plan, as far as a machine without a GPU can test it.

The emulator (direct_emulator.py) reads nothing but the integers of the plan, as the kernel does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import direct_emulator as emulator
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from upconv.cases import CASES
from upconv.planner import H200, Candidate, Problem, Refusal, direct, make_plan
from upconv.planner.direct_shape import Axis, Convolution, convolutions, row_choices
from upconv.planner.direct_tiling import (
    DOUBLE_TILES,
    FLOAT_TILES,
    LONG_TILES,
    Tiling,
    tiles_of,
    tilings,
)
from upconv.planner.lattice import Lattice

CONVOLUTIONS = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ndim = draw(st.integers(1, 3))
    each = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * ndim))  # noqa: E731
    stride, dilation = each(1, 5), each(1, 3)
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    problem = Problem(
        batch=draw(st.integers(1, 2)),
        in_channels=groups * draw(st.integers(1, 5)),
        out_channels=groups * draw(st.sampled_from((1, 1, 2, 3, 5, 8, 13))),
        in_size=each(1, {1: 40, 2: 9, 3: 4}[ndim]),
        kernel=each(1, {1: 9, 2: 5, 3: 3}[ndim]),
        stride=stride,
        padding=each(0, 3),
        output_padding=tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        ),
        dilation=dilation,
        groups=groups,
        dtype=draw(st.sampled_from(["float32", "float64", "bfloat16", "float16"])),
    )
    assume(min(problem.out_size) > 0)
    return problem


def data(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((problem.batch, problem.in_channels, *problem.in_size))
    outputs = problem.out_channels // problem.groups
    w = rng.standard_normal((problem.in_channels, outputs, *problem.kernel))
    return x, w, rng.standard_normal(problem.out_channels)


def expected_output(problem: Problem, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None):
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


def candidate(problem: Problem, multiprocessors: int = 132) -> Candidate:
    answer = direct.consider(problem, replace(H200, multiprocessors=multiprocessors))
    assert isinstance(answer, Candidate), answer
    return answer


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([1, 132]))
def test_the_emulated_kernel_computes_the_convolution(problem: Problem, sms: int) -> None:
    x, w, b = data(problem)
    y = emulator.run(candidate(problem, sms).params, x, w, b)
    expected = expected_output(problem, *map(torch.from_numpy, (x, w, b)))
    np.testing.assert_allclose(y.reshape(expected.shape), expected.numpy(), rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems(), st.data())
def test_every_choice_of_rows_and_tile_computes_the_convolution(
    problem: Problem, drawn: st.DataObject
) -> None:
    """Not the fastest choice alone: the measurements that fit the cost rule run the others too."""
    convolution = drawn.draw(st.sampled_from(convolutions(problem)))
    choices = row_choices(convolution, list(tiles_of(convolution)))
    tiling = drawn.draw(st.sampled_from(list(tilings(drawn.draw(st.sampled_from(choices)), H200))))
    x, w, b = data(problem)
    y = emulator.run(direct.record(tiling), x, w, b)
    expected = expected_output(problem, *map(torch.from_numpy, (x, w, b)))
    np.testing.assert_allclose(y.reshape(expected.shape), expected.numpy(), rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems())
def test_the_same_kernel_can_compute_the_gradient_of_the_input(problem: Problem) -> None:
    tiling = direct.best_tiling([Convolution.of_input_gradient(problem)], H200)
    assert tiling is not None
    x, w, _ = data(problem)
    inputs = torch.from_numpy(x).requires_grad_()
    y = expected_output(problem, inputs, torch.from_numpy(w), None)
    gy = np.random.default_rng(1).standard_normal(tuple(y.shape))
    (expected,) = torch.autograd.grad(y, inputs, torch.from_numpy(gy))
    gx = emulator.run(direct.record(tiling), gy, w, np.zeros(problem.in_channels))
    np.testing.assert_allclose(gx.reshape(expected.shape), expected.numpy(), rtol=1e-10, atol=1e-10)


def test_gradients_of_few_channels_are_its_own_and_others_are_not() -> None:
    fsrcnn = Problem.of(8, 56, 1, (256, 256), 9, 3, 4, 2, direction="grad_input")
    grouped = replace(
        Problem.of(8, 32, 32, (12, 24, 48), (3, 5, 7), 2, (1, 2, 3), 1, 1, 4),
        tf32=True,
        direction="grad_input",
    )
    assert make_plan(fsrcnn, H200).kernel == direct.KERNEL
    plan = make_plan(grouped, H200)
    assert plan.kernel == "sm90_wgmma_fprop", "PyTorch takes 3 ms"
    refusal = next(r for r in plan.refused if r.kernel == direct.KERNEL)
    assert "tensor cores" in refusal.reason


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems(), st.integers(1, 3000), st.integers(1, 300))
def test_every_plan_keeps_the_limits_of_the_kernel(problem: Problem, w: int, h: int) -> None:
    sizes = (*problem.in_size[:-2], *(h, w)[-min(problem.ndim, 2) :])
    problem = replace(problem, in_size=sizes, batch=7)
    assume(min(problem.out_size) > 0)
    plan = emulator.Plan(candidate(problem).params)
    emulator.check_memory(plan)
    assert plan.shared_bytes <= H200.shared_memory
    for table, most in (
        ("kind", "Kinds"),
        ("first", "Firsts"),
        ("offset", "Offsets"),
        ("tap", "Taps"),
    ):
        assert len(getattr(plan, table)) <= emulator.header_constant(f"kDirectMax{most}")
    for points, tiles, step, out, first in (
        (plan.tile_z, plan.tiles_z, plan.out_step_z, plan.out_d, 0),
        (plan.tile_y, plan.tiles_y, plan.out_step_y, plan.out_h, 0),
        (plan.tile_x, plan.tiles_x, plan.out_step_x, plan.out_w, plan.kind[0]["first_x"]),
    ):
        assert points * tiles * step + first >= out - step
    assert plan.blocks <= problem.batch * plan.tiles_z * plan.tiles_y * plan.tiles_x


def test_phases_are_turned_until_they_share_their_shifts() -> None:
    """Stride 3, kernel 9, padding 4: counted from output -1, all phases read shifts -1, 0, 1."""
    problem = Problem.of(1, 1, 1, (20,), 9, 3, 4, 2)
    axis = Axis.of(Lattice.of(problem, 0), 20)
    assert (axis.first, axis.shifts, axis.margin) == (-1, {-1, 0, 1}, 2)
    assert all(len(taps) == 3 for taps in axis.taps)


def test_points_of_one_output_are_widened() -> None:
    """A depthwise layer of stride 1 has one output a point: points of 2 or 4 share inputs."""
    ways = convolutions(Problem.of(2, 8, 8, (40, 40), 7, 1, 3, groups=8))
    assert [tuple(axis.in_step for axis in way.axes) for way in ways] == [
        (1, 1, 1),
        (1, 1, 2),
        (1, 1, 4),
        (1, 2, 2),
    ]
    assert len(convolutions(Problem.of(2, 8, 8, (40, 40), 4, 2, 1, groups=8))) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_has_a_plan(case) -> None:
    plan = emulator.Plan(candidate(case.problem()).params)
    emulator.check_memory(plan)


@pytest.mark.parametrize(("kernel", "stride"), [(64, 32), (32, 16), (16, 8), (1, 31), (40, 1)])
def test_large_strides_and_kernels_fit_the_tables(kernel: int, stride: int) -> None:
    """FCN-32s upsamples by 32 with a kernel of 64: 1,024 phases of 4 taps."""
    problem = Problem.of(2, 21, 21, (16, 16), kernel, stride, 0, groups=21)
    answer = direct.consider(problem, H200)
    if isinstance(answer, Refusal):
        assert kernel == 40
        assert "too many taps" in answer.reason
        return
    emulator.check_memory(emulator.Plan(answer.params))


def test_blocks_without_taps_are_known_by_their_first_rows() -> None:
    """Stride and dilation 2: every other output row has no tap and is bias alone."""
    problem = Problem.of(1, 8, 16, (8, 8), (3, 5), (2, 3), (1, 2), 0, (2, 1))
    plan = emulator.Plan(candidate(problem).params)
    lengths = [kind["end"] - kind["begin"] for kind in plan.kind]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"channels_last": True}, "contiguous layout only"),
        ({"batch": 0}, "nothing to compute"),
        ({"dtype": "complex64"}, "no complex64 form"),
        ({"in_size": (1 << 16, 1 << 16)}, "2^31 elements"),
        ({"kernel": (200, 200)}, "40000 taps"),
        ({"dilation": (30000, 1), "in_size": (60000, 8)}, "no tile fits"),
    ],
)
def test_refusals_say_why(change: dict[str, object], words: str) -> None:
    problem = replace(Problem.of(2, 4, 4, (8, 8), 3), **change)  # type: ignore[arg-type]
    answer = direct.consider(problem, H200)
    assert isinstance(answer, Refusal)
    assert words in answer.reason


def test_old_gpus_are_refused_by_their_capability() -> None:
    answer = direct.consider(Problem.of(2, 4, 4, (8, 8), 3), replace(H200, capability=(7, 5)))
    assert isinstance(answer, Refusal)
    assert "7.5" in answer.reason


def test_planner_and_header_agree_on_fields_and_limits() -> None:
    tiling = direct.best_tiling(convolutions(Problem.of(1, 8, 8, (4, 4), 3)), H200)
    assert isinstance(tiling, Tiling)
    counts = ["kinds", "firsts", "offsets", "taps"]
    assert [*direct.scalar_fields(tiling), *counts] == emulator.header_fields()
    for name, value in {
        "kDirectMaxKinds": direct.MAX_KINDS,
        "kDirectMaxFirsts": direct.MAX_FIRSTS,
        "kDirectMaxOffsets": direct.MAX_OFFSETS,
        "kDirectMaxTaps": direct.MAX_TAPS,
    }.items():
        assert emulator.header_constant(name) == value


def test_planner_and_kernel_agree_on_the_tiles() -> None:
    assert emulator.compiled_tiles("FLOAT") == FLOAT_TILES
    assert emulator.compiled_tiles("DOUBLE") == DOUBLE_TILES
    assert emulator.compiled_tiles("LONG") == LONG_TILES


def test_a_depthwise_layer_takes_the_kernel_and_a_dense_one_does_not() -> None:
    depthwise = Problem.of(8, 21, 21, (64, 64), 16, 8, 4, groups=21, tf32=True)
    assert make_plan(depthwise, H200).kernel == direct.KERNEL
    dense = Problem.of(64, 64, 128, (128, 256), (3, 5), tf32=True)
    assert make_plan(dense, H200).kernel != direct.KERNEL
    assert make_plan(dense, H200, forced=direct.KERNEL).kernel == direct.KERNEL


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("architecture", ["80", "86", "89", "90a", "100", "120"])
def test_the_kernel_compiles_without_spills(architecture: str, tmp_path: Path) -> None:
    """The two instantiations that need most registers."""
    source = tmp_path / "kernel.cu"
    source.write_text(
        '#include "direct_fprop.cuh"\nnamespace upconv::direct {\n'
        "template __global__ void direct_fprop_kernel<__nv_bfloat16, 12, 6, false>"
        "(const __grid_constant__ DirectParams);\n"
        "template __global__ void direct_fprop_kernel<double, 8, 4, false>"
        "(const __grid_constant__ DirectParams);\n}\n"
    )
    command = [
        "nvcc",
        "-std=c++17",
        "-O3",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
        "--expt-relaxed-constexpr",
        f"-I{emulator.CUDA}",
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
    assert len(spills) == 2, report
    assert max(spills) == 0, report
