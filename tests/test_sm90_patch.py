"""The Hopper kernel for patches: its plans, and its own code on a CPU (sm90_on_cpu.py)."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sm90_on_cpu
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_reports import spilled_bytes
from params_header import CUDA, ParamsHeader
from pixel_kernels import MULTIPROCESSORS, check
from sm90_references import expected, expected_grad_input

from upconv.planner import H200, Candidate, Problem, Refusal, make_plan, sm90_patch
from upconv.planner.operands import OPERANDS

DIRECTIONS = ("forward", "grad_input")


def layer(size: tuple[int, ...], kernel: int | tuple[int, ...], **rest: object) -> Problem:
    channels = {"batch": 2, "in_channels": 40, "out_channels": 24, "tf32": True}
    values = {**channels, **rest}
    first = [values.pop(name) for name in ("batch", "in_channels", "out_channels")]
    return Problem.of(*first, size, kernel, kernel, **values)  # type: ignore[arg-type]


# --- Plans -------------------------------------------------------------------------------------


def test_the_fields_are_those_of_the_header() -> None:
    tiling = next(sm90_patch.tilings(layer((8, 8), 2).in_three(), H200))
    assert list(sm90_patch.fields(tiling)) == ParamsHeader("sm90_patch_params.h").fields()


def test_the_tiles_are_those_that_are_compiled() -> None:
    source = (CUDA / "sm90_patch.cu").read_text()
    line = next(each for each in source.splitlines() if "define UPCONV_PATCH_TILES" in each)
    assert re.findall(r"X\((\d+)\)", line) == [str(n) for n in sm90_patch.TILES]
    assert f"kMostColumns = Operand::kSplit ? {max(sm90_patch.STRICT_TILES)} : 256;" in source


REFUSED = {
    "kernel": (Problem.of(2, 64, 64, (32, 32), 3, 2, tf32=True), "kernel is their stride"),
    "padding": (Problem.of(2, 64, 64, (32, 32), 2, 2, 1, tf32=True), "no padding"),
    "output padding": (Problem.of(2, 64, 64, (32, 32), 2, 2, 0, 1, tf32=True), "no padding"),
    "dilation": (Problem.of(2, 64, 64, (32, 32), 2, 2, dilation=3, tf32=True), "dilation"),
    "groups": (layer((32, 32), 2, in_channels=64, groups=2), "one group"),
    "layout": (
        layer((32, 32), 2, channels_last=True, direction="grad_input"),
        "contiguous layout only, for gradients",
    ),
    "strict channels_last": (
        layer((32, 32), 2, tf32=False, channels_last=True),
        "where float32 must not be rounded",
    ),
    "float64": (layer((32, 32), 2, dtype="float64"), "no float64 form"),
    "width": (layer((32, 31), 2), "even number of pixels, not 31"),
    "patch": (layer((32, 32), 3), "a multiple of 4, wide, not 3"),
    "pixels": (layer((7, 14), 2), "a multiple of 4 pixels, not 98"),
    "pixels in 16 bits": (layer((7, 14), 2, dtype="bfloat16"), "a multiple of 4 pixels, not 98"),
    "channels without a pair": (
        layer((14, 14), 2, in_channels=41, dtype="float16"),
        "16 bytes where the number of channels is odd",
    ),
    "gradient's rows": (layer((32, 7), 2, direction="grad_input"), "of 2 pixels, not 7"),
    "gradient's rows in 16 bits": (
        layer((32, 18), 2, direction="grad_input", dtype="bfloat16"),
        "of 4 pixels, not 18",
    ),
    "short rows of other patches": (
        layer((32, 14), (3, 2), direction="grad_input", dtype="bfloat16"),
        "of 4 pixels, not 14",
    ),
    "a short signal": (
        layer((14,), 2, direction="grad_input", dtype="bfloat16"),
        "of 4 pixels, not 14",
    ),
    "gradient's patch": (layer((32, 32), 4, direction="grad_input"), "2 wide, not 4"),
    "a long K": (layer((2, 16), (300, 2), out_channels=2048, direction="grad_input"), "too many"),
    "large": (layer((2**14, 2**12), 2, batch=1), "32-bit sizes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    problem, reason = REFUSED[name]
    answer = sm90_patch.consider(problem, H200)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("channels", "size"), [((1024, 512), (32, 32)), ((128, 64), (256, 256)), ((64, 32), (16, 32))]
)
def test_layers_of_a_unet_are_its_own(
    channels: tuple[int, int], size: tuple[int, int], direction: str
) -> None:
    problem = Problem.of(16, *channels, size, 2, 2, tf32=True, direction=direction)
    assert make_plan(problem, H200).kernel == sm90_patch.KERNEL


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("direction", "blocks"), [("forward", 1536 + 64), ("grad_input", 1792)])
def test_a_mask_head_in_16_bits_is_its_own(direction: str, blocks: int, dtype: str) -> None:
    """Forward, 4 pixels are left over of each image, 8 with what TMA brings at least. For the
    gradient, 4 rows of 14 are a block."""
    problem = Problem.of(512, 256, 256, (14, 14), 2, 2, dtype=dtype, direction=direction)
    assert make_plan(problem, H200).kernel == sm90_patch.KERNEL
    assert {tiling.blocks for tiling in tilings(problem)} == {blocks}


SHORT_ROWS = {
    (14, 14): 1,
    (3, 16): 1,
    (8, 8): 2,
    (5, 6): 2,  # the last part has one row
    (7, 4): 4,
    (2, 2): 2,
    (9, 2): 8,
    (8, 20): 0,
    (4, 32): 0,
}


@pytest.mark.parametrize("size", SHORT_ROWS)
def test_short_rows_share_a_part(size: tuple[int, int]) -> None:
    problem = layer(size, 2, batch=3, dtype="bfloat16", direction="grad_input")
    rows = SHORT_ROWS[size]
    assert sm90_patch.short_rows(problem) == rows
    for tiling in tilings(problem):
        assert sm90_patch.fields(tiling)["short_rows"] == rows
        of_single_rows = -(-3 * size[0] // 2)
        parts = 3 * -(-size[0] // max(rows, 1))
        assert tiling.blocks == (-(-parts // 4) if rows else of_single_rows)
        assert tiling.blocks <= of_single_rows
    assert sm90_patch.short_rows(replace(problem, dtype="float32")) == 0
    assert sm90_patch.short_rows(replace(problem, direction="grad_weight")) == 0


def test_a_stage_of_short_rows_has_16_channels_and_all_taps_of_a_slice() -> None:
    problem = layer((4, 6, 14), 2, out_channels=41, dtype="bfloat16", direction="grad_input")
    assert sm90_patch.depth(problem) == sm90_patch.depth(problem.in_three()) == 3 * 2


def test_boxes_of_paired_channels_fit_into_shared_memory() -> None:
    problem = layer((14, 14), 2, in_channels=1024, out_channels=512, dtype="bfloat16")
    for tiling in tilings(problem):
        boxes = 2 * tiling.box_stages * 64 * 144
        assert boxes + tiling.weight_stages * tiling.n * 128 <= 224 * 1024


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (layer((32, 32), 2, tf32=False), "float32 as two FP16 numbers"),
        (layer((14, 14), 2, dtype="bfloat16"), "two channels are one row"),
        (layer((14, 6), 2, dtype="bfloat16", direction="grad_input"), "2 whole rows"),
        (layer((32, 32), 2), ""),
    ],
)
def test_explain_tells_the_form(problem: Problem, words: str) -> None:
    answer = sm90_patch.consider(problem, H200)
    assert isinstance(answer, Candidate)
    assert len(answer.notes) == (3 if words else 2)
    assert words in answer.notes[-1]


def test_weights_stay_where_they_fit() -> None:
    answers = {}
    for channels in (128, 1024):
        problem = Problem.of(16, channels, 64, (64, 64), 2, 2, tf32=True).in_three()
        best = min(sm90_patch.tilings(problem, H200), key=lambda tiling: tiling.microseconds(H200))
        answers[channels] = best.resident
        assert best.weight_stages * best.n * 128 + best.box_stages * 2**14 <= 224 * 1024
    assert answers == {128: True, 1024: False}


# --- The kernel --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH")
    folder = tmp_path_factory.mktemp("patch")
    return sm90_on_cpu.compiled(folder, ("sm90_patch", "patch_driver"))


def tilings(problem: Problem) -> list[sm90_patch.Tiling]:
    hardware = replace(H200, multiprocessors=MULTIPROCESSORS)
    assert sm90_patch.refusal(problem, hardware) is None
    return list(sm90_patch.tilings(problem.in_three(), hardware))


@st.composite
def problems(draw: st.DrawFn, direction: str) -> Problem:
    ndim = draw(st.sampled_from([1, 2, 2, 3]))
    back, dtype = direction == "grad_input", draw(st.sampled_from(["float32", "bfloat16"]))
    size = [*draw(st.lists(st.integers(1, 7), min_size=ndim - 1, max_size=ndim - 1))]
    size.append(2 * draw(st.integers(1, 12)))
    steps = st.sampled_from([1, 2, 2, 3])
    kernel = draw(st.lists(steps, min_size=ndim - 1, max_size=ndim - 1))
    kernel.append(2 if back else draw(st.sampled_from([2, 2, 4, 8])))
    last = not back and ndim == 2 and draw(st.booleans())
    step = 8 if last else 1
    problem = Problem.of(
        draw(st.integers(1, 5)),
        draw(st.integers(8 // step, 80 // step)) * step,
        draw(st.integers(8 // step, 40 // step)) * step,
        size,
        kernel,
        kernel,
        dtype=dtype,
        tf32=last or draw(st.booleans()),
        bias=draw(st.booleans()),
        channels_last=last,
        direction=direction,
    )
    assume(sm90_patch.refusal(problem, H200) is None)
    return problem


@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), choose=st.randoms(use_true_random=False))
def test_the_kernel_computes_the_layer(
    library: ctypes.CDLL, direction: str, data: st.DataObject, choose: random.Random
) -> None:
    problem = data.draw(problems(direction))
    check(
        library, sm90_patch.record(choose.choice(tilings(problem))), problem, choose.randrange(99)
    )


WHOLE = {
    "two blocks of an image": layer((8, 16), 2),
    "half a block": layer((4, 8), 2),
    "4 pixels left over of each image": layer((14, 14), 2, batch=5, in_channels=16),
    "36 pixels left over": layer((10, 10), 2, batch=3),
    "8 pixels left over in 16 bits": layer((10, 20), 2, batch=9, dtype="float16"),
    "patches 4 wide": layer((6, 8), 4),
    "patches 4 wide, rows of 2 pixels": layer((8, 2), 4),
    "patches 8 wide": layer((4, 16), 8, in_channels=8, out_channels=8),
    "patches 4 wide in 16 bits": layer((8, 8), 4, dtype="bfloat16"),
    "a volume": layer((3, 4, 8), 2),
    "slices stay slices": layer((3, 4, 8), (1, 2, 2), dtype="bfloat16"),
    "a signal": layer((96,), 2),
    "pairs: 4 pixels left over of each image": layer((14, 14), 2, batch=9, dtype="bfloat16"),
    "pairs: 12 pixels left over": layer((2, 38), 2, batch=5, dtype="float16"),
    "pairs: 28 pixels left over": layer((10, 22), 2, batch=3, dtype="bfloat16"),
    "pairs: 44 pixels left over, one image": layer((18, 6), 2, batch=1, dtype="bfloat16"),
    "pairs: less than a block": layer((6, 10), 2, batch=3, dtype="bfloat16"),
    "pairs: 4 pixels": layer((2, 2), 2, batch=9, dtype="bfloat16"),
    "pairs: part of a stage": layer((6, 6), 2, in_channels=70, out_channels=9, dtype="bfloat16"),
    "pairs: patches 4 wide": layer((14, 14), 4, in_channels=10, dtype="float16"),
    "pairs: a volume": layer((3, 2, 10), 2, dtype="bfloat16"),
    "K of many stages": layer((4, 8), 2, in_channels=520, out_channels=8),
    "strict": layer((14, 14), 2, batch=3, tf32=False),
    "strict, patches 4 wide": layer((6, 8), 4, tf32=False),
    "strict, a volume": layer((3, 4, 8), 2, tf32=False, in_channels=136),
    "channels_last": layer((8, 16), 2, channels_last=True),
    "channels_last, odd rows": layer((5, 7), 3, batch=3, channels_last=True),
    "channels_last in 16 bits": layer((7, 7), 2, channels_last=True, dtype="bfloat16"),
    "channels_last, a volume": layer((3, 3, 5), (1, 2, 2), channels_last=True, dtype="float16"),
    "channels_last, many channels": layer(
        (4, 4), 2, in_channels=136, out_channels=120, channels_last=True, dtype="bfloat16"
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_tiling(library: ctypes.CDLL, name: str) -> None:
    problem = WHOLE[name]
    found = tilings(problem)
    wanted = sm90_patch.STRICT_TILES if problem.strict else sm90_patch.TILES
    assert {tiling.n for tiling in found} == set(wanted)
    for tiling in found:
        check(library, sm90_patch.record(tiling), problem, 0)


BACK = {
    "two blocks of an image": layer((8, 16), 2),
    "rows of 32": layer((3, 32), 2, dtype="bfloat16"),
    "part of a block": layer((3, 16), 2, batch=3),
    "rows of 14": layer((5, 14), 2, batch=3),
    "rows of 36 in 16 bits": layer((5, 36), 2, batch=2, dtype="bfloat16"),
    "a volume": layer((2, 3, 16), 2),
    "slices stay slices": layer((2, 2, 32), (1, 2, 2), dtype="float16"),
    "a signal": layer((96,), 2),
    "many channels": layer((2, 16), 2, in_channels=300, out_channels=70),
    "strict": layer((5, 14), 2, batch=3, tf32=False),
    "strict, a volume": layer((2, 3, 16), 2, tf32=False, out_channels=70),
    "short rows of 14": layer((14, 14), 2, batch=3, dtype="bfloat16"),
    "short rows of 10": layer((6, 10), 2, batch=3, dtype="float16"),
    "short rows, all that fit": layer((4, 16), 2, batch=1, dtype="bfloat16"),
    "two short rows": layer((18, 6), 2, out_channels=50, dtype="bfloat16"),
    "two short rows, and one left over": layer((5, 8), 2, batch=3, dtype="bfloat16"),
    "eight short rows, and one left over": layer((9, 2), 2, batch=5, dtype="bfloat16"),
    "short images": layer((2, 2), 2, batch=9, out_channels=9, dtype="bfloat16"),
    "short rows of a volume": layer((3, 5, 6), 2, dtype="bfloat16"),
    "short rows, slices stay slices": layer((3, 2, 14), (1, 2, 2), dtype="float16"),
    "short rows, many channels": layer(
        (3, 12), 2, in_channels=300, out_channels=70, dtype="bfloat16"
    ),
}


@pytest.mark.parametrize("name", BACK)
def test_every_tiling_of_the_gradient(library: ctypes.CDLL, name: str) -> None:
    problem = replace(BACK[name], direction="grad_input")
    for tiling in tilings(problem):
        check(library, sm90_patch.record(tiling), problem, 0)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "size", [(14, 14), (6, 10), (2, 2), (18, 6), (5, 8), (3, 3, 4)], ids=lambda s: f"{s}"
)
def test_a_nan_spoils_its_own_patch_alone(
    library: ctypes.CDLL, size: tuple[int, ...], direction: str
) -> None:
    """A box has more than its pixels: of other channels, rows and images."""
    problem = layer(size, 2, batch=3, in_channels=34, dtype="bfloat16", direction=direction)
    for seed, tiling in enumerate(tilings(problem)):
        check(library, sm90_patch.record(tiling), problem, seed, nans=8)


NO_PLANS = {
    ("forward", "pairs in 32 bits"): {"operand": 0},
    ("forward", "a channel without a pair"): {"in_channels": 41},
    ("forward", "planes of a multiple of 16 bytes"): {"in_h": 12},
    ("forward", "pairs on channels_last"): {"channels_last": 1},
    ("forward", "short rows"): {"short_rows": 1},
    ("grad_input", "short rows in 32 bits"): {"operand": 0},
    ("grad_input", "more rows than a part has"): {"short_rows": 2},
    ("grad_input", "short rows of an odd number of pixels"): {"in_w": 13},
    ("grad_input", "short rows of higher patches"): {"step_y": 3},
    ("grad_input", "pairs"): {"paired": 1},
}


@pytest.mark.parametrize(("direction", "name"), NO_PLANS, ids="{}".format)
def test_what_is_no_plan_is_not_run(library: ctypes.CDLL, direction: str, name: str) -> None:
    problem = layer((14, 14), 2, dtype="bfloat16", direction=direction)
    fields = sm90_patch.fields(tilings(problem)[0])
    check(library, tuple(fields.values()), problem, 0)
    changed = {**fields, **NO_PLANS[direction, name]}
    with pytest.raises(AssertionError, match="do not make a plan"):
        check(library, tuple(changed.values()), problem, 0)


# --- float32 that must not be rounded ------------------------------------------------------------


def computed(
    library: ctypes.CDLL, problem: Problem, x: np.ndarray, w: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the kernel makes of float32, what it should be, and that if nothing cancelled."""
    reference = expected if problem.direction == "forward" else expected_grad_input
    none = (np.zeros(problem.out_channels),) if problem.direction == "forward" else ()
    exact = x.astype(np.float64), w.astype(np.float64)
    wanted, largest = (reference(problem, *f(exact), *none) for f in (tuple, absolute))
    record = sm90_patch.record(tilings(problem)[0])
    y = sm90_on_cpu.run(library, record, x, w, None, wanted.shape, MULTIPROCESSORS)
    return y, wanted, largest


def absolute(values: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    return [np.abs(each) for each in values]


STRICT = {
    "forward": layer((4, 8), 2, tf32=False, in_channels=264),
    "grad_input": layer((4, 8), 2, tf32=False, out_channels=66, direction="grad_input"),
}


@pytest.mark.parametrize("direction", STRICT)
def test_float32_that_must_not_be_rounded_keeps_its_bits(
    library: ctypes.CDLL, direction: str
) -> None:
    """TF32 alone leaves 3e-4; the stand-in truncates sums as the tensor cores do."""
    problem = STRICT[direction]
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    sides = {"forward": (problem.in_channels, problem.in_size)}
    channels, size = sides.get(direction, (problem.out_channels, problem.out_size))
    x = normal(problem.batch, channels, *size)
    w = normal(problem.in_channels, problem.out_channels, *problem.kernel)
    y, wanted, _ = computed(library, problem, x, w)
    assert np.linalg.norm(y - wanted) / np.linalg.norm(wanted) < 3e-7


@pytest.mark.parametrize("sizes", [(-1, 5), (-36, 0), (-40, 36), (28, 35), (-43, -37)])
def test_numbers_of_every_size_keep_their_bits(
    library: ctypes.CDLL, sizes: tuple[int, int]
) -> None:
    """FP16 ends at 65504: each pixel has a size of its own, and all are as exact as float32."""
    problem = layer((8, 16), 2, tf32=False, batch=1)
    rng = np.random.default_rng(0)
    size = 10.0 ** rng.permutation(np.linspace(*sizes, 128)).reshape(8, 16)
    x = (rng.uniform(0.5, 1, (1, 40, 8, 16)) * size).astype(np.float32)
    w = rng.uniform(-1, 1, (40, 24, 2, 2)).astype(np.float32)
    w *= 10.0 ** rng.integers(-3, 1, (1, 24, 1, 1))  # every channel, too
    y, wanted, largest = computed(library, problem, x, w)
    error = np.abs(y - wanted) - 2.0**-137  # denormal numbers have fewer bits
    assert (error / largest).max() < 3e-7


@pytest.mark.parametrize("sizes", [(1e-30, 1.0), (1.0, 1e-30), (1.0, 1e30), (1e-38, 1e37)])
def test_stages_of_different_size_add_up(library: ctypes.CDLL, sizes: tuple[float, float]) -> None:
    """The first 32 channels, and the others: sums are kept in a unit that fits the larger ones."""
    problem = layer((4, 8), 2, tf32=False, batch=1)
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 1, (1, 40, 4, 8))
    x[:, :32] *= sizes[0]
    x[:, 32:] *= sizes[1]
    w = rng.uniform(-1, 1, (40, 24, 2, 2)).astype(np.float32)
    y, wanted, largest = computed(library, problem, x.astype(np.float32), w)
    assert (np.abs(y - wanted) / largest).max() < 3e-7


def test_a_large_number_whose_weight_is_zero_costs_no_bits(library: ctypes.CDLL) -> None:
    """Of what lies beside it: tails are kept 2^11 times as large as they are."""
    problem = layer((4, 8), 2, tf32=False, batch=1)
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 1, (1, 40, 4, 8)).astype(np.float32)
    w = rng.uniform(-1, 1, (40, 24, 2, 2)).astype(np.float32)
    x[:, 3], w[3] = 3.4e8, 0
    y, wanted, largest = computed(library, problem, x, w)
    assert (np.abs(y - wanted) / largest).max() < 3e-7


def test_infinities_and_nan_pass_the_split(library: ctypes.CDLL) -> None:
    """As IEEE 754 has it, whatever the tails of the numbers that they meet."""
    problem = layer((1, 8), (1, 2), tf32=False, batch=1, in_channels=8, out_channels=8)
    x = np.ones((1, 8, 1, 8), dtype=np.float32) / 3
    x[0, 0, 0] = [np.inf, -np.inf, np.nan, 3.4e8, -3.4e8, 1.0, 0.1, 0.0]
    w = np.ones((8, 8, 1, 2), dtype=np.float32) / 3
    w[0, :, 0, 0] = [0.1, -0.3, 1.0, np.inf, -np.inf, np.nan, 0.0, 1e-3]
    with np.errstate(invalid="ignore"):
        y, wanted, _ = computed(library, problem, x, w)
    np.testing.assert_allclose(y, wanted, rtol=1e-6)


# --- Blocks --------------------------------------------------------------------------------------


def test_what_is_left_over_of_an_image_is_not_computed_alone() -> None:
    """512 images of 14 x 14 are 1536 whole blocks and 32 of 4 pixels of 16 images each."""
    problem = Problem.of(512, 256, 256, (14, 14), 2, 2, tf32=True)
    assert {tiling.blocks for tiling in tilings(problem)} == {1536 + 32}
    answer = sm90_patch.consider(problem, H200)
    assert isinstance(answer, Candidate)
    assert f"{1568 * 64} pixels" in answer.notes[0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_the_kernels_compile_without_spills(tmp_path: Path) -> None:
    forms = 3 * len(OPERANDS) + 2 * 2  # pairs and short rows: 16 bits
    kernels = forms * (len(sm90_patch.TILES) + 1)  # and those that pack
    kernels += 2 * (len(sm90_patch.STRICT_TILES) + 2)
    assert spilled_bytes(CUDA / "sm90_patch.cu", tmp_path) == [0] * kernels
