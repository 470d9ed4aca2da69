"""The weight's gradient of all phases of a row on Hopper: its plans, and its own code on a CPU."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import wgrad_on_cpu
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_reports import spilled_bytes
from params_header import CUDA, ParamsHeader
from strategies import unaligned_planes

from upconv.planner import H200, Problem, Refusal, make_plan, sm90_phases_wgrad
from upconv.planner.operands import OPERANDS

SMALL = replace(H200, multiprocessors=3)


def layer(size: tuple[int, ...], kernel: int | tuple[int, ...] = 4, **rest: object) -> Problem:
    """The rows' own kernel, stride and padding, unless others are given."""
    taps = kernel if isinstance(kernel, int) else kernel[-1]
    values = {"batch": 2, "in_channels": 40, "out_channels": 24, "tf32": True, **rest}
    first = [values.pop(name) for name in ("batch", "in_channels", "out_channels")]
    steps = [values.pop(name, default) for name, default in (("stride", 2), ("padding", 1))]
    last = [0] * (len(size) - 1) + [int(taps == 3)]  # so that rows have 16 bytes again
    values.setdefault("output_padding", tuple(last))
    values.setdefault("direction", "grad_weight")
    return Problem.of(*first, size, kernel, *steps, **values)  # type: ignore[arg-type]


# --- Plans -------------------------------------------------------------------------------------


def test_the_fields_are_those_of_the_header() -> None:
    tiling = next(sm90_phases_wgrad.tilings(layer((8, 8)).in_three(), H200))
    header = ParamsHeader("sm90_wgrad_phases_params.h")
    assert list(sm90_phases_wgrad.fields(tiling)) == header.fields()


@pytest.mark.parametrize("name", ["TWO", "WIDE", "SQUARE"])
def test_the_forms_are_those_that_are_compiled(name: str) -> None:
    source = (CUDA / "sm90_wgrad_phases.cu").read_text()
    text = re.search(rf"define UPCONV_PHASES_WGRAD_{name}\(X\)(.*?)\n#", source, re.DOTALL)
    assert text is not None
    found = [tuple(map(int, form.split(","))) for form in re.findall(r"X\(([\d, ]+)\)", text[1])]
    assert found == list(getattr(sm90_phases_wgrad, name))


REFUSED = {
    "kernel": (layer((8, 32), 5), "3 or 4 taps"),
    "stride": (layer((8, 32), stride=4), "takes stride 2"),
    "padding of wide strides": (layer((512,), 16, stride=8, padding=6), "takes stride 2"),
    "taps of wide strides": (layer((512,), 12, stride=4, padding=4), "takes stride 2"),
    "padding": (layer((8, 32), padding=0), "padding 1"),
    "long rows of patches": (layer((8, 36), 2, padding=0), "whole rows in 128 bytes"),
    "rows of patches": (layer((7, 14), 2, padding=0), "whole rows in 128 bytes"),
    "odd rows of patches": (layer((8, 7), 2, padding=0), "whole rows in 128 bytes"),
    "the same in 16 bits": (layer((8, 7), 2, padding=0, dtype="float16"), "whole rows in 128"),
    "rows": (layer((8, 14)), "a multiple of 16 bytes, not 14"),
    "rows in 16 bits": (layer((8, 12), dtype="bfloat16"), "a multiple of 16 bytes, not 12"),
    "odd outputs": (layer((8, 32), 3, output_padding=0), "rows of grad_output"),
    "groups": (layer((8, 32), groups=2), "one group"),
    "strict": (layer((8, 32), tf32=False), "fp32_precision forbids"),
    "weights": (layer((8, 32), in_channels=2**13, out_channels=2**12), "its 32-bit sizes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    problem, reason = REFUSED[name]
    answer = sm90_phases_wgrad.consider(problem, H200)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("channels", "size"), [((512, 256), (8, 8)), ((128, 64), (32, 32))])
def test_layers_of_a_generator_are_its_own(
    channels: tuple[int, int], size: tuple[int, int], dtype: str
) -> None:
    problem = layer(size, batch=128, in_channels=channels[0], out_channels=channels[1], dtype=dtype)
    chosen = make_plan(problem, H200).chosen
    assert chosen.kernel == sm90_phases_wgrad.KERNEL
    assert chosen.with_bias
    assert "workspace" in " ".join(chosen.notes)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *(((14, 14), "float32"), ((28, 28), "float32"), ((28, 28), "bfloat16")),
        *(((16, 16), "float16"), ((14, 14), "bfloat16"), ((10, 10), "float16")),
    ],
)
def test_patches_of_small_images_are_its_own(size: tuple[int, int], dtype: str) -> None:
    channels = {"batch": 128, "in_channels": 256, "out_channels": 256}
    chosen = make_plan(layer(size, 2, padding=0, dtype=dtype, **channels), H200).chosen
    assert chosen.kernel == sm90_phases_wgrad.KERNEL
    assert chosen.with_bias


@pytest.mark.parametrize(
    ("size", "run"),
    [
        *(((14, 14), (2, 2)), ((10, 10), (2, 3)), ((6, 10), (6, 1)), ((7, 26), (1, 2))),
        *(((28, 28), (2, 0)), ((16, 14), (4, 0)), ((7, 7), (0, 0)), ((7, 66), (0, 0))),
    ],
)
def test_runs_of_rows_fill_a_part(size: tuple[int, int], run: tuple[int, int]) -> None:
    """Rows of a run, and runs that loaders copy. TMA wherever it can: (n, 0)."""
    assert sm90_phases_wgrad.square_run(layer(size, 2, padding=0, dtype="bfloat16")) == run


def test_copies_of_x_are_told() -> None:
    channels = {"batch": 512, "in_channels": 256, "out_channels": 256}
    problem = layer((14, 14), 2, padding=0, dtype="bfloat16", **channels)
    notes = make_plan(problem, H200).chosen.notes
    assert "loaders copy x: 2 x 2 rows in a part" in notes


def test_the_bias_comes_along_where_some_rows_meet_each_number_once() -> None:
    adds = sm90_phases_wgrad.adds_bias
    assert adds(layer((8, 32)))
    assert adds(layer((64,)))
    assert adds(layer((8, 32), (3, 4), stride=(1, 2)))
    assert not adds(layer((8, 32), bias=False))
    assert not adds(layer((8, 32), (3, 4), stride=(1, 2), padding=(0, 1)))  # more rows of outputs
    assert not adds(layer((8, 32), (1, 4), stride=(2, 2), padding=(0, 1)))  # rows without a tap


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("channels", [64, 1024])
def test_the_workspace_is_bounded(batch: int, channels: int) -> None:
    """Two thread blocks' sums for each multiprocessor, or those of every job once."""
    problem = layer((64, 64), batch=batch, in_channels=channels, out_channels=channels).in_three()
    tilings = sm90_phases_wgrad.tilings(problem, H200)
    best = min(tilings, key=lambda tiling: tiling.microseconds(H200))
    assert best.units <= max(best.jobs, 2 * H200.multiprocessors)
    assert best.workspace <= max(36 * 2**20, 4 * 16 * channels**2 + best.units * 2048)
    assert best.stages >= 4


# --- The kernel --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH")
    folder = tmp_path_factory.mktemp("phases_wgrad")
    return wgrad_on_cpu.compiled(folder, ("sm90_wgrad_phases", "phases_wgrad_driver"))


def check(library: ctypes.CDLL, tiling: sm90_phases_wgrad.Tiling, problem: Problem) -> None:
    record = sm90_phases_wgrad.record(tiling)
    wgrad_on_cpu.check(library, record, problem, tiling.sums)


def tilings(problem: Problem) -> list[sm90_phases_wgrad.Tiling]:
    assert sm90_phases_wgrad.refusal(problem, SMALL) is None
    return list(sm90_phases_wgrad.tilings(problem.in_three(), SMALL))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ndim, dtype = draw(st.sampled_from([1, 2, 2, 3])), draw(st.sampled_from(["float32", "float16"]))
    some = lambda low, high: st.lists(  # noqa: E731
        st.integers(low, high), min_size=ndim - 1, max_size=ndim - 1
    )
    row = draw(st.sampled_from([(3, 2, 1), (4, 2, 1), (16, 8, 4), (4, 4, 0), (8, 4, 4), (8, 8, 0)]))
    kernel, stride = draw(some(1, 4)), draw(some(1, 3))
    padding = [draw(st.integers(0, (k - 1) // 2)) for k in kernel]
    last = (4 if dtype == "float32" else 8) * draw(st.integers(1, 10))
    problem = layer(
        (*draw(some(1, 5)), last),
        (*kernel, row[0]),
        stride=(*stride, row[1]),
        padding=(*padding, row[2]),
        batch=draw(st.integers(1, 3)),
        in_channels=draw(st.integers(8, 140)),
        out_channels=draw(st.integers(8, 140)),
        dtype=dtype,
        bias=draw(st.booleans()),
    )
    # Of 8 taps and stride 4 not every row of grad_output has 16 bytes.
    assume(sm90_phases_wgrad.refusal(problem, SMALL) is None)
    return problem


@st.composite
def copied(draw: st.DrawFn) -> Problem:
    """2 x 2, where no run of whole rows begins on 16 bytes."""
    deep = draw(st.sampled_from([(), (2,), (3,)]))
    kernel = (*deep, 2, 2)
    problem = layer(
        (*deep, *draw(unaligned_planes(10))),
        kernel,
        stride=kernel,
        padding=0,
        output_padding=0,
        batch=draw(st.integers(1, 5)),
        in_channels=draw(st.integers(8, 140)),
        out_channels=draw(st.integers(8, 140)),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        bias=draw(st.booleans()),
    )
    assert sm90_phases_wgrad.square_run(problem).copied
    return problem


@st.composite
def patches(draw: st.DrawFn) -> Problem:
    """2 x 2, with rows so short that a part has whole ones."""
    dtype = draw(st.sampled_from(["float32", "float16"]))
    width = draw(st.integers(1, 32 if dtype == "float32" else 64))
    deep = draw(st.sampled_from([(), (2,)]))
    kernel = (*deep, 2, 2)
    problem = layer(
        (*deep, draw(st.integers(1, 16)), width),
        kernel,
        stride=kernel,
        padding=0,
        output_padding=0,
        batch=draw(st.integers(1, 3)),
        in_channels=draw(st.integers(8, 140)),
        out_channels=draw(st.integers(8, 140)),
        dtype=dtype,
        bias=draw(st.booleans()),
    )
    assume(sm90_phases_wgrad.refusal(problem, SMALL) is None)
    return problem


@settings(max_examples=80, deadline=None, derandomize=True)
@given(problem=st.one_of(problems(), patches(), copied()), choose=st.randoms(use_true_random=False))
def test_the_kernel_computes_the_gradient(
    library: ctypes.CDLL, problem: Problem, choose: random.Random
) -> None:
    check(library, choose.choice(tilings(problem)), problem)


LAYERS = {
    "one part": layer((1, 32), batch=1),
    "two rows in a part": layer((5, 16)),
    "four rows in a part": layer((8, 8), out_channels=70),
    "eight rows in a part, 16 bits": layer((9, 8), dtype="bfloat16"),
    "fewer parts than workers": layer((1, 16), batch=1, out_channels=200),
    "several parts in a row": layer((3, 100), batch=1),
    "the same in 16 bits": layer((3, 136), batch=1, dtype="bfloat16"),
    "rows that fill no part": layer((4, 12)),
    "three taps": layer((6, 32), 3),
    "many channels": layer((2, 32), in_channels=300, out_channels=150, batch=1),
    "other rows of taps": layer((4, 16), (3, 4), stride=(1, 2), padding=(0, 1)),
    "rows without a tap": layer((4, 16), (1, 4), stride=(2, 2), padding=(0, 1)),
    "a volume": layer((2, 3, 16), dtype="bfloat16"),
    "a signal": layer((192,)),
    "without bias": layer((4, 32), bias=False),
    "a vocoder": layer((96,), 16, stride=8, padding=4, in_channels=150),
    "a vocoder in 16 bits": layer((200,), 16, stride=8, padding=4, dtype="bfloat16"),
    "a vocoder, padding 0": layer((64,), 16, stride=8, padding=0, dtype="float16", batch=1),
    "patches of 4 x 4": layer((5, 12), 4, stride=4, padding=0, out_channels=70),
    "patches of 4 x 4 in 16 bits": layer((3, 40), 4, stride=4, padding=0, dtype="bfloat16"),
    "patches of 8 x 8": layer((2, 40), 8, stride=8, padding=0, batch=1),
    "two rows of 32, 16 bits": layer((3, 32), 8, stride=8, padding=0, dtype="bfloat16"),
    "patches of 2 x 2": layer((14, 14), 2, padding=0, out_channels=70),
    "one row in a part": layer((5, 28), 2, padding=0, in_channels=130),
    "rows of 2": layer((8, 2), 2, padding=0),
    "rows of 6 in 16 bits": layer((8, 6), 2, padding=0, dtype="float16"),
    "patches of 2 x 2 in 16 bits": layer((4, 28), 2, padding=0, dtype="bfloat16"),
    "full parts in 16 bits": layer((4, 32), 2, padding=0, dtype="float16", batch=1),
    "rows of 14 in 16 bits": layer((14, 14), 2, padding=0, dtype="bfloat16", out_channels=70),
    "runs on 4 bytes": layer((7, 26), 2, padding=0, dtype="float16", in_channels=130),
    "a run of all rows": layer((6, 10), 2, padding=0, dtype="bfloat16", batch=5),
    "three runs in a part": layer((10, 10), 2, padding=0, dtype="float16", in_channels=200),
    "images smaller than runs": layer((2, 2), 2, padding=0, dtype="bfloat16", batch=13),
    "a part of many images": layer((2, 2), 2, padding=0, dtype="float16", batch=3),
    "runs of 9 rows": layer((18, 6), 2, padding=0, dtype="float16", batch=1, in_channels=72),
    "the longest rows": layer((3, 62), 2, padding=0, dtype="bfloat16", batch=1),
    "runs without bias": layer((14, 14), 2, padding=0, dtype="float16", bias=False, batch=3),
    "a volume of runs": layer(
        (3, 3, 14), (2, 2, 2), stride=2, padding=0, output_padding=0, dtype="bfloat16", batch=3
    ),
    "a volume of patches": layer((3, 4, 6), (3, 2, 2), stride=(3, 2, 2), padding=0),
    "patches without bias": layer((4, 20), 2, padding=0, bias=False),
    "twice a stride of 4": layer((3, 36), (2, 8), stride=(1, 4), padding=(0, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_tiling(library: ctypes.CDLL, name: str) -> None:
    for tiling in tilings(LAYERS[name]):
        check(library, tiling, LAYERS[name])


RUNS = layer((14, 14), 2, padding=0, dtype="bfloat16", in_channels=130, out_channels=70, batch=3)


@pytest.mark.parametrize("of_x", [True, False], ids=["x", "grad_output"])
def test_numbers_that_are_none_stay_in_their_channel(library: ctypes.CDLL, of_x: bool) -> None:
    """The last pixel of an image: behind it in the part lie the next image's, or none."""
    shapes = ((RUNS.batch, RUNS.in_channels, 14, 14), (RUNS.batch, RUNS.out_channels, 28, 28))
    for image in range(RUNS.batch):
        x, gy = (np.ones(shape) for shape in shapes)
        (x if of_x else gy)[image, 5, -1, -1] = np.nan
        for tiling in tilings(RUNS):
            wanted = np.full((130, 70, 2, 2), RUNS.batch * 14.0 * 14.0)
            wanted[(5,) if of_x else (slice(None), 5, 1, 1)] = np.nan
            record = sm90_phases_wgrad.record(tiling)
            gw, gb = wgrad_on_cpu.run(library, record, x, gy, wanted.size)
            np.testing.assert_allclose(gw.reshape(wanted.shape), wanted, rtol=2**-8)
            assert np.isnan(gb).nonzero()[0].tolist() == ([] if of_x else [5])


@pytest.mark.parametrize(
    "wrong",
    [
        *({"runs": 3}, {"runs": -1}, {"operand": 0}, {"stages": 2}, {"rows": 2}, {"in_w": 30}),
        *({"square": 7}, {"square": 0}, {"out_w": 56}, {"in_h": 0}),
    ],
    ids=str,
)
def test_plans_that_would_read_elsewhere_are_none(
    library: ctypes.CDLL, wrong: dict[str, int]
) -> None:
    fields = sm90_phases_wgrad.fields(tilings(RUNS)[0])
    x, gy = np.zeros((3, 130, 14, 14)), np.zeros((3, 70, 28, 28))
    wgrad_on_cpu.run(library, tuple(fields.values()), x, gy, 130 * 70 * 4)
    record = tuple({**fields, **wrong}.values())
    with pytest.raises(AssertionError, match="do not make a plan"):
        wgrad_on_cpu.run(library, record, x, gy, 130 * 70 * 4)


@pytest.mark.parametrize("kernel", [3, 4])
def test_teams_share_many_workers(library: ctypes.CDLL, kernel: int) -> None:
    """Whose sums one team of threads would add up alone were they fewer."""
    problem = layer((20, 32), kernel, batch=1, in_channels=8)
    for tiling in tilings(problem):
        check(library, replace(tiling, workers=19), problem)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_the_kernels_compile_without_spills(tmp_path: Path) -> None:
    spills = spilled_bytes(CUDA / "sm90_wgrad_phases.cu", tmp_path)
    ways = (sm90_phases_wgrad.TWO, sm90_phases_wgrad.WIDE, sm90_phases_wgrad.SQUARE)
    forms = sum(map(len, ways))
    copied = 2 * len(sm90_phases_wgrad.SQUARE)  # 16-bit types
    assert len(spills) == len(OPERANDS) * (forms + 2) + copied  # and those that add up
    assert max(spills) == 0
