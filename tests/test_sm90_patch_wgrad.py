"""The weight's gradient of patches on Hopper: its plans, and its own code on a CPU."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import wgrad_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reports import spilled_bytes
from params_header import CUDA, ParamsHeader

from upconv.planner import H200, Candidate, Problem, Refusal, make_plan, sm90_patch_wgrad
from upconv.planner.operands import OPERANDS

MULTIPROCESSORS = 3


def layer(size: tuple[int, ...], kernel: int | tuple[int, ...] = 2, **rest: object) -> Problem:
    values = {"batch": 2, "in_channels": 40, "out_channels": 24, "tf32": True, **rest}
    first = [values.pop(name) for name in ("batch", "in_channels", "out_channels")]
    values.setdefault("direction", "grad_weight")
    return Problem.of(*first, size, kernel, kernel, **values)  # type: ignore[arg-type]


# --- Plans -------------------------------------------------------------------------------------


def test_the_fields_are_those_of_the_header() -> None:
    tiling = next(sm90_patch_wgrad.tilings(layer((8, 8)).in_three(), H200))
    header = ParamsHeader("sm90_wgrad_patch_params.h")
    assert list(sm90_patch_wgrad.fields(tiling)) == header.fields()


def test_the_tiles_are_those_that_are_compiled() -> None:
    source = (CUDA / "sm90_wgrad_patch.cu").read_text()
    line = next(each for each in source.splitlines() if "define UPCONV_PATCH_WGRAD_TILES" in each)
    assert re.findall(r"X\((\d+)\)", line) == [str(n) for n in sm90_patch_wgrad.TILES]


REFUSED = {
    "kernel": (Problem.of(2, 64, 64, (8, 32), 3, 2, tf32=True), "kernel is their stride"),
    "rows": (layer((8, 13)), "a multiple of 2 pixels, not 13"),
    "rows in 16 bits": (layer((8, 14), dtype="bfloat16"), "a multiple of 4 pixels, not 14"),
    "images": (layer((7, 14)), "images of a multiple of 16 bytes"),
    "patch": (layer((8, 32), 4), "2 wide, not 4"),
    "strict": (layer((8, 32), tf32=False), "fp32_precision forbids"),
    "weights": (layer((8, 32), in_channels=2**15, out_channels=2**14), "2^31 elements"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    problem, reason = REFUSED[name]
    answer = sm90_patch_wgrad.consider(replace(problem, direction="grad_weight"), H200)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


@pytest.mark.parametrize(
    ("channels", "size"), [((512, 256), (48, 48)), ((128, 64), (256, 256)), ((256, 128), (64, 64))]
)
def test_layers_of_a_unet_are_its_own(channels: tuple[int, int], size: tuple[int, int]) -> None:
    problem = Problem.of(16, *channels, size, 2, 2, tf32=True, direction="grad_weight")
    chosen = make_plan(problem, H200).chosen
    assert chosen.kernel == sm90_patch_wgrad.KERNEL
    assert chosen.with_bias
    assert "workspace" in " ".join(chosen.notes)


@pytest.mark.parametrize("batch", [1, 64])
def test_the_workspace_is_bounded(batch: int) -> None:
    """Two thread blocks' sums for each multiprocessor, or those of every job once."""
    for channels in (64, 1024):
        problem = Problem.of(batch, channels, channels, (64, 64), 2, 2, tf32=True)
        problem = replace(problem, direction="grad_weight")
        answer = sm90_patch_wgrad.consider(problem, H200)
        assert isinstance(answer, Candidate)
        best = min(
            sm90_patch_wgrad.tilings(problem.in_three(), H200),
            key=lambda tiling: tiling.microseconds(H200),
        )
        assert best.units <= max(best.jobs, 2 * H200.multiprocessors)
        assert best.workspace <= max(36 * 2**20, 2 * 4 * 4 * channels**2)


# --- The kernel --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH")
    folder = tmp_path_factory.mktemp("patch_wgrad")
    return wgrad_on_cpu.compiled(folder, ("sm90_wgrad_patch", "patch_wgrad_driver"))


def check(library: ctypes.CDLL, tiling: sm90_patch_wgrad.Tiling, problem: Problem) -> None:
    wgrad_on_cpu.check(library, sm90_patch_wgrad.record(tiling), problem, problem.bias)


def tilings(problem: Problem) -> list[sm90_patch_wgrad.Tiling]:
    hardware = replace(H200, multiprocessors=MULTIPROCESSORS)
    assert sm90_patch_wgrad.refusal(problem, hardware) is None
    return list(sm90_patch_wgrad.tilings(problem.in_three(), hardware))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ndim, dtype = draw(st.sampled_from([1, 2, 2, 3])), draw(st.sampled_from(["float32", "float16"]))
    size = draw(st.lists(st.integers(1, 5), min_size=ndim - 1, max_size=ndim - 1))
    vector = 4 if dtype == "float32" else 8
    # Every other row may begin between two vectors, but no image.
    size.append(vector // (1 if prod(size) % 2 else 2) * draw(st.integers(1, 9)))
    kernel = (*draw(st.lists(st.integers(1, 3), min_size=ndim - 1, max_size=ndim - 1)), 2)
    return layer(
        tuple(size),
        kernel,
        batch=draw(st.integers(1, 4)),
        in_channels=draw(st.integers(8, 140)),
        out_channels=draw(st.integers(8, 140)),
        dtype=dtype,
        bias=draw(st.booleans()),
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(problem=problems(), choose=st.randoms(use_true_random=False))
def test_the_kernel_computes_the_gradient(
    library: ctypes.CDLL, problem: Problem, choose: random.Random
) -> None:
    check(library, choose.choice(tilings(problem)), problem)


LAYERS = {
    "one part": layer((1, 16), batch=1),
    "fewer parts than workers": layer((1, 32), batch=1, out_channels=200),
    "many workers": layer((20, 32)),
    "rows of 20": layer((7, 20)),
    "rows of 14": layer((6, 14)),
    "rows of 2": layer((6, 2)),
    "rows of 18, one part longer": layer((4, 18)),
    "rows of 28 in 16 bits": layer((4, 28), dtype="bfloat16"),
    "a volume with rows of 10": layer((3, 2, 10)),
    "rows of 40 in 16 bits": layer((5, 40), dtype="bfloat16"),
    "many channels": layer((2, 16), in_channels=300, out_channels=150),
    "an odd number of blocks": layer((4, 16), (1, 2), out_channels=70),
    "a volume": layer((2, 3, 16), dtype="bfloat16"),
    "a signal": layer((96,)),
    "without bias": layer((4, 32), bias=False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_tiling(library: ctypes.CDLL, name: str) -> None:
    for tiling in tilings(LAYERS[name]):
        check(library, tiling, LAYERS[name])


def test_teams_share_many_workers(library: ctypes.CDLL) -> None:
    """Whose sums one team of threads would add up alone were they fewer."""
    problem = layer((20, 32), batch=1)
    for tiling in tilings(problem):
        check(library, replace(tiling, workers=19), problem)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_the_kernels_compile_without_spills_in_the_main_loop(tmp_path: Path) -> None:
    """ptxas counts spills of the whole kernel; the few bytes allowed lie around the loop."""
    spills = spilled_bytes(CUDA / "sm90_wgrad_patch.cu", tmp_path)
    assert len(spills) == len(OPERANDS) * (len(sm90_patch_wgrad.TILES) + 2)  # and those that add up
    assert max(spills) <= 32
