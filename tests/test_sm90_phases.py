"""The Hopper kernel for both phases of a row: its plans, and its own code on a CPU."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sm90_on_cpu
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_reports import spilled_bytes
from params_header import CUDA, ParamsHeader
from pixel_kernels import MULTIPROCESSORS, check, lost, measurements, picked

from upconv.planner import (
    ATEN,
    H200,
    Problem,
    Refusal,
    make_plan,
    sm90,
    sm90_phases,
    sm90_phases_wgrad,
    sm90_wgrad,
)
from upconv.planner.operands import OPERANDS

DIRECTIONS = ("forward", "grad_input")


def layer(
    size: tuple[int, ...],
    kernel: int | tuple[int, ...] = 4,
    stride: int | tuple[int, ...] = 2,
    padding: int | tuple[int, ...] = 1,
    output_padding: int | tuple[int, ...] = 0,
    **rest: object,
) -> Problem:
    values = {"batch": 2, "in_channels": 24, "out_channels": 20, "tf32": True, **rest}
    first = [values.pop(name) for name in ("batch", "in_channels", "out_channels")]
    shape = (size, kernel, stride, padding, output_padding)
    return Problem.of(*first, *shape, **values)  # type: ignore[arg-type]


# --- Plans -------------------------------------------------------------------------------------


def test_the_fields_are_those_of_the_header() -> None:
    tiling = next(sm90_phases.tilings(layer((8, 8)).in_three(), H200))
    assert list(sm90_phases.fields(tiling)) == ParamsHeader("sm90_phases_params.h").fields()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_tiles_are_those_that_are_compiled(direction: str) -> None:
    name = {"forward": "FORWARD", "grad_input": "BACKWARD"}[direction]
    source = (CUDA / "sm90_phases.cu").read_text()
    line = next(line for line in source.splitlines() if f"define UPCONV_PHASES_{name}" in line)
    found = re.findall(r"X\((\d+), (\d+)\)", line)
    assert [(int(n), int(many)) for n, many in found] == list(sm90_phases.TILES[direction])


REFUSED = {
    "stride": (layer((8, 32), 3, (2, 1)), "takes stride 2"),
    "taps": (layer((8, 32), 5), "3 or 4 taps"),
    "padding": (layer((8, 32), 4, 2, 2), "padding 1"),
    "dilation": (layer((8, 32), dilation=2), "no dilation"),
    "groups": (layer((8, 32), groups=2), "one group"),
    "layout": (layer((8, 32), channels_last=True), "contiguous layout only"),
    "strict": (layer((8, 32), tf32=False), "fp32_precision forbids"),
    "float64": (layer((8, 32), dtype="float64"), "no float64 form"),
    "width": (layer((32, 30)), "a multiple of 16 bytes, not 30"),
    "width in 16 bits": (layer((32, 12), dtype="bfloat16"), "a multiple of 16 bytes, not 12"),
    "gradient's rows": (layer((32, 31), direction="grad_input"), "of 16 bytes, not 62"),
    "large": (layer((2**14, 2**14), batch=1), "32-bit sizes"),
    "endless phases": (layer((1, 1, 32), 4, (40000, 40000, 2), 1), "do not fit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    problem, reason = REFUSED[name]
    answer = sm90_phases.consider(problem, H200)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


def banks(tiling: sm90_phases.Tiling) -> set[int]:
    """Of the words that lanes read at a time: 4 channels, and 8 words of one or two octets."""
    width, height, deep = tiling.box
    element = tiling.problem.element_bytes
    row, channel = width * element // 4, width * height * deep * element // 4
    step = 2 if channel // 4 % 2 else 1
    below = row if tiling.octets == 1 and not tiling.flat else 4
    narrow = element == 2 and not tiling.backward
    words = [i % 4 + i // 4 * below if narrow else i for i in range(8)]
    return {(t * step * channel + word) % 32 for t in range(4) for word in words}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("layers", "size"), [((128, 512, 256), (8, 8)), ((64, 256, 256), (64, 48))]
)
def test_layers_of_generators_and_pose_heads_are_its_own(
    layers: tuple[int, ...], size: tuple[int, int], direction: str
) -> None:
    problem = Problem.of(*layers, size, 4, 2, 1, tf32=True, direction=direction)
    chosen = make_plan(problem, H200).chosen
    assert chosen.kernel == sm90_phases.KERNEL
    assert "both phases of a row" in chosen.notes[0]


def test_images_of_few_pixels_are_left_to_others() -> None:
    """Of 64 rows of a product 4 x 4 pixels fill 16."""
    problem = Problem.of(128, 1024, 512, (4, 4), 4, 2, 1, tf32=True)
    assert make_plan(problem, H200).kernel != sm90_phases.KERNEL


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.tuples(*[st.integers(1, 40)] * 2, st.integers(1, 300)),
    st.tuples(*[st.integers(1, 6)] * 2),
    st.tuples(*[st.integers(1, 4)] * 2),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(DIRECTIONS),
)
def test_lanes_read_from_different_banks(
    size: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], dtype: str, way: str
) -> None:
    """What a phase of a load reads: 32 words of as many banks."""
    problem = layer(
        (*size[:2], size[2] * 8), (*kernel, 4), (*stride, 2), (0, 0, 1), dtype=dtype, direction=way
    )
    assume(sm90_phases.refusal(problem, H200) is None)
    for tiling in sm90_phases.tilings(problem, H200):
        assert len(banks(tiling)) == 32
        taken = (
            tiling.weight_stages * tiling.weight_bytes + 2 * tiling.box_stages * tiling.box_bytes
        )
        assert taken + sm90_phases.HEADER_BYTES <= H200.shared_memory


# --- The kernel --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH")
    folder = tmp_path_factory.mktemp("phases")
    return sm90_on_cpu.compiled(folder, ("sm90_phases", "phases_driver"))


def tilings(problem: Problem) -> list[sm90_phases.Tiling]:
    hardware = replace(H200, multiprocessors=MULTIPROCESSORS)
    assert sm90_phases.refusal(problem, hardware) is None
    return list(sm90_phases.tilings(problem.in_three(), hardware))


@st.composite
def problems(draw: st.DrawFn, direction: str) -> Problem:
    ndim = draw(st.sampled_from([1, 2, 2, 3]))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    rows = lambda low, high: draw(  # noqa: E731
        st.lists(st.integers(low, high), min_size=ndim - 1, max_size=ndim - 1)
    )
    stride = rows(1, 3)
    problem = layer(
        (*rows(1, 6), 4 * draw(st.integers(1, 10))),
        (*rows(1, 5), draw(st.sampled_from(sm90_phases.TAPS))),
        (*stride, 2),
        (*rows(0, 2), 1),
        (*(draw(st.integers(0, s - 1)) for s in stride), draw(st.integers(0, 1))),
        batch=draw(st.integers(1, 3)),
        in_channels=draw(st.integers(8, 40)),
        out_channels=draw(st.integers(8, 40)),
        dtype=dtype,
        bias=draw(st.booleans()),
        direction=direction,
    )
    assume(min(problem.out_size) > 0)
    assume(sm90_phases.refusal(problem, H200) is None)
    assume(tilings(problem))  # many taps of a volume do not fit
    return problem


@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), choose=st.randoms(use_true_random=False))
def test_the_kernel_computes_the_layer(
    library: ctypes.CDLL, direction: str, data: st.DataObject, choose: random.Random
) -> None:
    problem = data.draw(problems(direction))
    check(
        library, sm90_phases.record(choose.choice(tilings(problem))), problem, choose.randrange(99)
    )


WHOLE = {
    "small images": layer((8, 8)),
    "rows of a block's width": layer((4, 16), batch=1),
    "what divides by nothing": layer((5, 20), batch=1),
    "in 16 bits": layer((5, 24), dtype="bfloat16", batch=1),
    "three taps": layer((6, 16), 3, 2, 1, 1, dtype="float16", batch=1),
    "three taps, an odd output": layer((6, 8), 3, 2, 1),
    "rows without a phase": layer((6, 8), (1, 4), 2, (0, 1), (1, 0)),
    "no step between rows": layer((6, 8), (3, 4), (1, 2), (1, 1)),
    "more padding": layer((6, 16), 4, 2, (3, 1)),
    "a volume": layer((3, 4, 8), batch=1),
    "a signal": layer((128,)),
    "many channels": layer((2, 8), in_channels=72, out_channels=140, batch=1),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", WHOLE)
def test_every_tiling(library: ctypes.CDLL, name: str, direction: str) -> None:
    problem = replace(WHOLE[name], direction=direction)
    if name == "three taps, an odd output" and direction == "grad_input":
        assert "16 bytes, not 15" in str(sm90_phases.refusal(problem, H200))
        return
    for tiling in tilings(problem):
        check(library, sm90_phases.record(tiling), problem, 0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_the_kernels_compile_without_spills(tmp_path: Path) -> None:
    forms = sum(len(tiles) + 1 for tiles in sm90_phases.TILES.values())  # and those that pack
    kernels = forms * len(OPERANDS) * len(sm90_phases.TAPS)
    assert spilled_bytes(CUDA / "sm90_phases.cu", tmp_path) == [0] * kernels


# --- The measurements behind the rule ----------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> list[tuple[Problem, dict[str, Any], list[tuple[Any, float]]]]:
    return measurements("h200-phases-2026-11-16.jsonl.gz")


def test_what_the_rule_picks_is_among_the_fastest(measured: Any) -> None:
    losses = [lost(choices) for _, _, choices in measured]
    assert len(losses) > 80
    assert sum(losses) / len(losses) < 0.02
    assert max(losses) < 0.2


def test_the_kernel_is_chosen_where_it_is_the_fastest(measured: Any) -> None:
    """Of this one, or its like for the weight's gradient, that for all layers, and PyTorch's."""
    losses = []
    for problem, line, choices in measured:
        by_weight = problem.direction == "grad_weight"
        ours, other = (sm90_phases_wgrad, sm90_wgrad) if by_weight else (sm90_phases, sm90)
        times = {ours.KERNEL: picked(choices), other.KERNEL: line["other"], ATEN: line["pytorch"]}
        chosen = make_plan(problem, H200).kernel
        losses.append(times[chosen] / min(times.values()) - 1)
    assert sum(losses) / len(losses) < 0.02
