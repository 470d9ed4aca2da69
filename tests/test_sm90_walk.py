"""The Hopper kernel that walks: its plans, and its own code on a CPU."""

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
from walk_layers import DIRECTIONS, Most, walk_problems

from upconv.planner import ATEN, H200, Problem, Refusal, make_plan, sm90, sm90_walk
from upconv.planner.operands import OPERANDS

MOST = Most(batch=3, channels=40, rows=9, vectors=8)


def layer(size: tuple[int, ...], kernel: int | tuple[int, ...] = 3, **rest: object) -> Problem:
    values = {"batch": 2, "in_channels": 24, "out_channels": 20, "tf32": True, **rest}
    first = [values.pop(name) for name in ("batch", "in_channels", "out_channels")]
    steps = [values.pop(name, default) for name, default in STEPS]
    return Problem.of(*first, size, kernel, *steps, **values)  # type: ignore[arg-type]


STEPS = (("stride", 1), ("padding", 1), ("output_padding", 0), ("dilation", 1))


# --- Plans -------------------------------------------------------------------------------------


def test_the_fields_are_those_of_the_header() -> None:
    tiling = next(sm90_walk.tilings(layer((8, 8)), H200))
    assert list(sm90_walk.fields(tiling)) == ParamsHeader("sm90_walk_params.h").fields()


def test_the_tiles_are_those_that_are_compiled() -> None:
    source = (CUDA / "sm90_walk.cu").read_text().replace("\\\n", " ")
    found = re.findall(r"X\((\d+), (\d+), (\d+), (\d+)\)", source)
    assert [tuple(map(int, tile)) for tile in found] == list(sm90_walk.TILES)


REFUSED = {
    "stride": (layer((8, 32), stride=2), "takes stride 1 only"),
    "gradient's stride": (
        layer((8, 32), stride=2, dilation=2, direction="grad_input"),
        "takes stride 1 only",
    ),
    "taps": (layer((8, 32), 4), "takes 3 taps side by side"),
    "dilation": (layer((8, 32), dilation=2), "takes 3 taps side by side"),
    "groups": (layer((8, 32), groups=2), "one group"),
    "layout": (layer((8, 32), channels_last=True), "contiguous layout only"),
    "strict": (layer((8, 32), tf32=False), "fp32_precision forbids"),
    "float64": (layer((8, 32), dtype="float64"), "no float64 form"),
    "width": (layer((32, 30)), "a multiple of 16 bytes, not 30"),
    "width in 16 bits": (layer((32, 12), dtype="bfloat16"), "a multiple of 16 bytes, not 12"),
    "gradient's rows": (
        layer((32, 32), padding=0, direction="grad_input"),
        "of 16 bytes, not 34",
    ),
    "large": (layer((2**15, 2**14), batch=1), "32-bit sizes"),
    "rows beyond all boxes": (layer((2, 8, 32), (1, 400, 3), padding=(0, 1, 1)), "do not fit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    problem, reason = REFUSED[name]
    answer = sm90_walk.consider(problem, H200)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


def banks(tiling: sm90_walk.Tiling) -> list[set[int]]:
    """Of the words that lanes read at a time: 4 channels, and 8 words of an octet or of two.

    The second octet lies behind the first one, or begins the next row of the strip.
    """
    element, (width, height) = tiling.element_bytes, tiling.box
    channel = width * height * element // 4
    step = 2 if channel // 4 % 2 else 1
    seconds = [4]
    if element == 2 and tiling.strip % 2:
        seconds.append((width - (tiling.strip - 1) * 8) * element // 4)
    every = [[0, 1, 2, 3, *range(at, at + 4)] if element == 2 else range(8) for at in seconds]
    return [
        {(t * step * channel + word) % 32 for t in range(4) for word in words} for words in every
    ]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.tuples(*[st.integers(1, 40)] * 2, st.integers(1, 300)),
    st.tuples(st.sampled_from([1, 3]), st.integers(1, 6), st.sampled_from([3, 5, 7])),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(DIRECTIONS),
)
def test_lanes_read_from_different_banks(
    size: tuple[int, ...], kernel: tuple[int, ...], dtype: str, way: str
) -> None:
    """What a phase of a load reads: 32 words of as many banks."""
    problem = layer((*size[:2], size[2] * 8), kernel, dtype=dtype, direction=way)
    assume(min(problem.out_size) > 0)
    assume(sm90_walk.refusal(problem, H200) is None)
    for tiling in sm90_walk.tilings(problem, H200):
        assert all(len(found) == 32 for found in banks(tiling))
        taken = (
            tiling.weight_stages * tiling.weight_bytes
            + 2 * tiling.box_stages * tiling.box_bytes
            + tiling.stage_pieces * tiling.stage_bytes
        )
        assert taken + sm90_walk.HEADER_BYTES <= H200.shared_memory


# --- The kernel --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH")
    folder = tmp_path_factory.mktemp("walk")
    return sm90_on_cpu.compiled(folder, ("sm90_walk", "walk_driver"))


def tilings(problem: Problem) -> list[sm90_walk.Tiling]:
    hardware = replace(H200, multiprocessors=MULTIPROCESSORS)
    assert sm90_walk.refusal(problem, hardware) is None
    return list(sm90_walk.tilings(problem, hardware))


@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), choose=st.randoms(use_true_random=False))
def test_the_kernel_computes_the_layer(
    library: ctypes.CDLL, direction: str, data: st.DataObject, choose: random.Random
) -> None:
    problem = data.draw(walk_problems(MOST, (direction,)))
    check(library, sm90_walk.record(choose.choice(tilings(problem))), problem, choose.randrange(99))


WHOLE = {
    "an image": layer((6, 16), batch=1),
    "what divides by nothing": layer((5, 20), batch=1, padding=0),
    "in 16 bits": layer((5, 24), dtype="bfloat16", batch=1),
    "more rows than taps of the walk": layer(
        (2, 6, 16), (1, 5, 3), padding=(0, 1, 1), dtype="float16"
    ),
    "a volume": layer((4, 4, 8), batch=1),
    "a signal": layer((256,), batch=3),
    "rows that are apart": layer((3, 6, 16), dilation=(1, 2, 1), padding=(1, 2, 1), batch=1),
    "seven taps": layer((5, 16), (3, 7), padding=0, batch=1, dtype="bfloat16"),
    "planes of one wide row": layer((320,), in_channels=16, batch=1),
    "one tap of the walk, more octets than a strip has": layer((2, 264), (1, 3), padding=(0, 1)),
    "many channels": layer((3, 8), in_channels=72, out_channels=140, batch=1),
    "more padding than taps": layer((6, 16), padding=2),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", WHOLE)
def test_every_tiling(library: ctypes.CDLL, name: str, direction: str) -> None:
    problem = replace(WHOLE[name], direction=direction)
    reason = sm90_walk.refusal(problem, H200)
    if direction == "grad_input" and reason is not None:
        assert "16 bytes, not" in reason or "takes stride 1 only" in reason
        return
    for tiling in tilings(problem):
        check(library, sm90_walk.record(tiling), problem, 0)


NO_PLANS = {
    "a ring of one box": {"box_stages": 1},
    "a ring of one stage of weights": {"resident": 0, "weight_stages": 1},
    "weights that do not all stay": {"weight_stages": 2},
    "rows that go backwards": {"step_y": -1},
    "no images": {"batch": 0},
    "no channels": {"out_channels": 0},
    "a narrow box": {"box_w": 12},
    "too many pieces": {"stage_pieces": 17},
}


@pytest.mark.parametrize("name", NO_PLANS)
def test_what_is_no_plan_is_not_run(library: ctypes.CDLL, name: str) -> None:
    problem = layer((6, 16), batch=1, in_channels=40)
    fields = sm90_walk.fields(next(each for each in tilings(problem) if each.resident))
    assert fields["weight_stages"] > 2
    check(library, tuple(fields.values()), problem, 0)
    with pytest.raises(AssertionError, match="do not make a plan"):
        check(library, tuple({**fields, **NO_PLANS[name]}.values()), problem, 0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_the_kernels_compile_without_spills(tmp_path: Path) -> None:
    kernels = (len(sm90_walk.TILES) + 1) * len(OPERANDS)  # and those that pack
    assert spilled_bytes(CUDA / "sm90_walk.cu", tmp_path) == [0] * kernels


# --- The measurements behind the rule ----------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> list[tuple[Problem, dict[str, Any], list[tuple[Any, float]]]]:
    every = measurements("h200-walks-2026-11-19.jsonl.gz")
    return [
        each for each in every if each[2]
    ]  # images as whole planes are no longer walked through


def test_what_the_rule_picks_is_among_the_fastest(measured: Any) -> None:
    losses = [lost(choices) for _, _, choices in measured]
    assert len(losses) > 60
    assert sum(losses) / len(losses) < 0.025
    assert max(losses) < 0.35


def test_the_kernel_is_chosen_where_it_is_the_fastest(measured: Any) -> None:
    losses = []
    for problem, line, choices in measured:
        ours = {sm90_walk.KERNEL: picked(choices), sm90.KERNEL: line["other"]}
        times = {**ours, ATEN: line["pytorch"]}
        losses.append(times[make_plan(problem, H200).kernel] / min(times.values()) - 1)
    assert sum(losses) / len(losses) < 0.02
    assert max(losses) < 0.2
