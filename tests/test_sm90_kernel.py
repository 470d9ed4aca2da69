"""The Hopper kernel's own code, run on a CPU (sm90_on_cpu.py): drawn layers and any tiling of them.

What PyTorch computes in float64 is the measure. The numbers are small and whole, so that TF32 makes
no error at all and 16 bits only that of their output.
"""

from __future__ import annotations

import ctypes
import random
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sm90_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from sm90_references import STRIPS, TASKS, expected, expected_grad_input, problems

from upconv.planner import H200, Problem, sm90, sm90_area, sm90_search, sm90_tiling
from upconv.planner.sm90_task import Shape, Task

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH")


MULTIPROCESSORS = 2


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return sm90_on_cpu.compiled(tmp_path_factory.mktemp("sm90"))


def tilings(task: Task) -> list[tuple[Shape, list[sm90.Job], sm90_tiling.Tiling]]:
    """Every tiling of a task."""
    hardware = replace(H200, multiprocessors=MULTIPROCESSORS)
    result = []
    for shape in sm90.shapes(task):
        by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in range(1, 5)}
        for tiling in sm90_search.tilings(shape, by_blocks, hardware):
            job_list = by_blocks[tiling.blocks]
            assert job_list is not None
            result.append((shape, job_list, tiling))
    return result


def check_result(
    library: ctypes.CDLL, problem: Problem, direction: str, record: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    whole = lambda *shape: rng.integers(-3, 4, shape).astype(np.float64)  # noqa: E731
    w = whole(problem.in_channels, problem.out_channels // problem.groups, *problem.kernel)
    if direction == "forward":
        x = whole(problem.batch, problem.in_channels, *problem.in_size)
        bias: np.ndarray | None = whole(problem.out_channels)
        wanted = expected(problem, x, w, bias)
    else:
        x = whole(problem.batch, problem.out_channels, *problem.out_size)
        bias = None
        wanted = expected_grad_input(problem, x, w)
    last = problem.channels_last
    y = sm90_on_cpu.run(library, record, x, w, bias, wanted.shape, MULTIPROCESSORS, seed, last)
    tolerance = 0 if record[0] in sm90_on_cpu.WIDE else 2**-8
    np.testing.assert_allclose(y, wanted, rtol=tolerance, atol=0)


@pytest.mark.parametrize("direction", TASKS)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(problem=problems(), choose=st.randoms(use_true_random=False))
def test_the_kernel_computes_the_convolution(
    library: ctypes.CDLL, direction: str, problem: Problem, choose: random.Random
) -> None:
    shape, job_list, tiling = choose.choice(tilings(TASKS[direction](problem)))
    check_result(
        library, problem, direction, sm90.record(shape, job_list, tiling), choose.randrange(99)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("direction", TASKS)
def test_boxes_with_a_step_bring_every_plane(
    library: ctypes.CDLL, direction: str, dtype: str
) -> None:
    problem = Problem.of(2, 24, 16, (3, 6, 8), 4, 2, 1, groups=2, dtype=dtype, tf32=True)
    chosen = [
        found
        for found in tilings(TASKS[direction](problem))
        if found[2].area.copy == sm90_area.COPY_BOXES
    ]
    shape, job_list, tiling = min(chosen, key=lambda found: found[2].cycles)
    check_result(library, problem, direction, sm90.record(shape, job_list, tiling), 0)


def test_a_job_without_taps_in_a_plane_gives_its_slot_back(library: ctypes.CDLL) -> None:
    """Two depth phases share a unit; the first of them has no tap at the second depth."""
    kernel, stride, padding = (3, 1, 1), (2, 1, 1), (1, 0, 0)
    problem = Problem.of(1, 8, 64, (30, 2, 4), kernel, stride, padding, dtype="bfloat16")
    chosen = [found for found in tilings(TASKS["forward"](problem)) if not found[2].alternate]
    shape, job_list, tiling = min(chosen, key=lambda found: found[2].slots)
    check_result(library, problem, "forward", sm90.record(shape, job_list, tiling), 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [(4, 14), (8, 5), (40, 10), (3, 8, 3), (7, 7), (3, 3, 5)])
def test_images_without_margins_are_long_rows(
    library: ctypes.CDLL, size: tuple[int, ...], dtype: str
) -> None:
    problem = Problem.of(3, 24, 24, size, 2, 2, dtype=dtype, tf32=True)
    chosen = [found for found in tilings(TASKS["forward"](problem)) if found[2].area.flat]
    by_images = {found[2].area.images: found for found in chosen}
    assert len(by_images) > 1 or size in ((40, 10), (3, 8, 3))
    for shape, job_list, tiling in (chosen[0], chosen[len(chosen) // 2], *by_images.values()):
        check_result(library, problem, "forward", sm90.record(shape, job_list, tiling), 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_boxed_tiles_lie_as_close_as_stores_and_loaders_allow(
    library: ctypes.CDLL, dtype: str
) -> None:
    """Images 8 wide with a margin of one: 9 pixels a row in TF32, 10 where two go together."""
    problem = Problem.of(3, 16, 72, (8, 8), 4, 2, 1, dtype=dtype, tf32=True)
    pitch = 9 if dtype == "float32" else 10
    chosen = [
        found
        for found in tilings(TASKS["forward"](problem))
        if found[2].area.pitch == pitch and found[2].area.copy == sm90_area.COPY_BOXES
    ]
    images = {found[2].area.images for found in chosen}
    assert len(images) > 1
    for shape, job_list, tiling in (chosen[0], chosen[len(chosen) // 2], chosen[-1]):
        check_result(library, problem, "forward", sm90.record(shape, job_list, tiling), 0)


@pytest.mark.parametrize("dtype", ["strict", "float32", "bfloat16"])
@pytest.mark.parametrize("name", STRIPS)
def test_rows_in_strips(library: ctypes.CDLL, name: str, dtype: str) -> None:
    """8 columns with margins of their own: the WGMMA's groups of columns lie further apart."""
    direction, layer = STRIPS[name]
    tf32 = dtype != "strict"
    problem = Problem.of(*layer, dtype=dtype if tf32 else "float32", tf32=tf32)
    found = tilings(TASKS[direction](problem))
    by_area = {each[2].area: each for each in found if each[2].area.in_strips}
    assert by_area
    for shape, job_list, tiling in random.Random(0).choices([*by_area.values()], k=3):
        check_result(library, problem, direction, sm90.record(shape, job_list, tiling), 0)


ROWS = {
    "one class, margins": ("forward", (2, 12, 24, (6, 10), 3, 1, 1), (1, 2)),
    "rows of odd length": ("forward", (1, 16, 16, (5, 7), 3, 1, 1), (4, 8)),
    "one long row": ("forward", (2, 16, 24, (37,), 5, 1, 2, 0, 2), (4, 8)),
    "depths and groups": ("forward", (1, 32, 32, (3, 5, 6), 3, 1, 1, 0, 1, 2), (2, 4)),
    "gradient": ("grad_input", (2, 24, 16, (9, 20), 3), (2, 4)),
    "gradient with steps": ("grad_input", (2, 24, 16, (7, 13), (3, 4), (2, 3), 1), (2, 4)),
    "gradient with a step of 5": ("grad_input", (1, 12, 32, (5, 9), 3, 5, 1, 0, 2), (4, 8)),
    "small images, several a tile": ("grad_input", (4, 16, 8, (4, 5), 3), (2, 4)),
}
"""Direction, layer, and every how many-th channel begins on 16 bytes in float32 and bfloat16."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_do_not_begin_on_16_bytes(library: ctypes.CDLL, name: str, dtype: str) -> None:
    """Boxes of every few rows and channels, which hold numbers of other rows beside their own."""
    direction, layer, classes = ROWS[name]
    problem = Problem.of(*layer, dtype=dtype, tf32=True)
    chosen = [
        found
        for found in tilings(TASKS[direction](problem))
        if found[2].area.copy == sm90_area.COPY_ROWS
    ]
    assert {found[2].box.raw_classes for found in chosen} == {classes[dtype == "bfloat16"]}
    best = min(chosen, key=lambda found: found[2].cycles)
    for shape, job_list, tiling in (chosen[0], best, chosen[-1]):
        check_result(library, problem, direction, sm90.record(shape, job_list, tiling), 0)


@pytest.mark.parametrize("direction", TASKS)
def test_nan_beside_a_row_stays_out_of_it(library: ctypes.CDLL, direction: str) -> None:
    """A box has the end of one row beside the begin of the next: only outputs that read a NaN may
    become one."""
    problem = Problem.of(1, 8, 8, (6, 6), 3, 1, 1, tf32=True)
    shape, job_list, tiling = min(
        tilings(TASKS[direction](problem)), key=lambda found: found[2].cycles
    )
    assert tiling.area.copy == sm90_area.COPY_ROWS
    x = np.ones((1, 8, 6, 6))
    x[0, 3, 2, 5] = x[0, 0, 5, 0] = np.nan
    w = np.ones((8, 8, 3, 3))
    record = sm90.record(shape, job_list, tiling)
    y = sm90_on_cpu.run(library, record, x, w, None, (1, 8, 6, 6), MULTIPROCESSORS)
    wanted = expected(problem, x, w, np.zeros(8))  # ones: the gradient is the same sum
    np.testing.assert_array_equal(np.isnan(y), np.isnan(wanted))


def idle(*layer: Any) -> Problem:
    return Problem.of(*layer, dtype="bfloat16", channels_last=True)


IDLE = {
    "units without taps": (idle(3, 16, 72, (1, 7), (1, 2), (4, 3), 0, (3, 1)), (64, 1, 2, 8, True)),
    "units in turn": (idle(2, 16, 104, (7, 1), (1, 2), (3, 2), 0, (0, 1), 2), (240, 1, 2, 6, True)),
    "most units without taps": (
        idle(3, 32, 64, (6, 1), (1, 2), (2, 3), 0, 0, 2),
        (216, 1, 4, 6, True),
    ),
    "jobs without taps": (
        idle(2, 32, 48, (2, 7), (2, 1), (4, 3), 0, (2, 0), 2),
        (128, 2, 2, 4, False),
    ),
    "one job of two without taps": (
        idle(3, 8, 88, (4, 5), (2, 1), 3, 0, (2, 1), 2),
        (128, 2, 2, 8, False),
    ),
}
"""Layers with jobs that multiply nothing, which only channels_last has (elsewhere their rows are
filled), and the tiling (N, row blocks, channel blocks of a slice, weight stages, units in turn)
with which a kernel hangs that does not keep such a job's warps together."""


@pytest.mark.parametrize("name", IDLE)
@pytest.mark.parametrize("seed", range(6))
def test_jobs_without_products_keep_up(library: ctypes.CDLL, name: str, seed: int) -> None:
    """Nothing but a barrier keeps the warps of such a job together, and it must give every slot
    back by itself; else one warp, or the loaders, wait for ever."""
    problem, wanted = IDLE[name]
    chosen = [
        (shape, job_list, tiling)
        for shape, job_list, tiling in tilings(TASKS["forward"](problem))
        if (tiling.n, tiling.blocks, tiling.slice_blocks, tiling.weights.stages, tiling.alternate)
        == wanted
    ]
    assert chosen
    for shape, job_list, tiling in chosen[:3]:
        check_result(library, problem, "forward", sm90.record(shape, job_list, tiling), seed)


def strict(problem: Problem) -> tuple[Shape, list[sm90.Job], sm90_tiling.Tiling]:
    """The fastest tiling of a layer whose float32 must not be rounded."""
    assert not problem.tf32
    return min(tilings(TASKS["forward"](problem)), key=lambda found: found[2].cycles)


def strict_error(library: ctypes.CDLL, problem: Problem, record: tuple[int, ...]) -> float:
    """Distance from float64, relative to its norm, for numbers of 24 significant bits."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    x = normal(problem.batch, problem.in_channels, *problem.in_size)
    w = normal(problem.in_channels, problem.out_channels // problem.groups, *problem.kernel)
    b = normal(problem.out_channels)
    wanted = expected(problem, *(each.astype(np.float64) for each in (x, w, b)))
    last = problem.channels_last
    y = sm90_on_cpu.run(library, record, x, w, b, wanted.shape, MULTIPROCESSORS, channels_last=last)
    return float(np.linalg.norm(y - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(
    "problem",
    [
        Problem.of(1, 200, 20, (5, 8), 3),
        Problem.of(1, 24, 72, (5, 9), (4, 3), 2, 1),
        Problem.of(1, 40, 16, (6, 8), 7),
        Problem.of(2, 512, 16, (4, 8), 2, 2),
        Problem.of(1, 64, 16, (8, 8), 3, channels_last=True),
    ],
    ids=["many slices", "stride", "many taps", "one tap a phase", "channels_last"],
)
def test_float32_that_must_not_be_rounded_keeps_its_bits(
    library: ctypes.CDLL, problem: Problem
) -> None:
    """TF32 alone leaves 3e-4; the stand-in truncates sums as the tensor core does."""
    shape, job_list, tiling = strict(problem)
    assert strict_error(library, problem, sm90.record(shape, job_list, tiling)) < 4e-7


def test_sums_that_are_not_added_up_are_truncated_too_often(library: ctypes.CDLL) -> None:
    problem = Problem.of(2, 512, 16, (4, 8), 2, 2)
    shape, job_list, tiling = strict(problem)
    names = list(tiling.fields(shape))
    record = list(sm90.record(shape, job_list, tiling))
    record[names.index("sum_slices")] = 1 << 30
    assert strict_error(library, problem, tuple(record)) > 1e-6


def test_infinities_and_nan_pass_the_split(library: ctypes.CDLL) -> None:
    """As IEEE 754 has it, whatever the tails of the numbers that they meet."""
    problem = Problem.of(1, 8, 8, (1, 8), 1)
    record = sm90.record(*strict(problem))
    x = np.ones((1, 8, 1, 8), dtype=np.float32) / 3
    x[0, 0, 0] = [np.inf, -np.inf, np.nan, 3.4e8, -3.4e8, 1.0, 0.1, 0.0]
    w = np.ones((8, 8, 1, 1), dtype=np.float32) / 3
    w[0, :, 0, 0] = [0.1, -0.3, 1.0, np.inf, -np.inf, np.nan, 0.0, 1e-3]
    y = sm90_on_cpu.run(library, record, x, w, None, (1, 8, 1, 8), MULTIPROCESSORS)
    wanted = expected(problem, x.astype(np.float64), w.astype(np.float64), np.zeros(8))
    np.testing.assert_allclose(y, wanted, rtol=1e-6)


RANGES = {
    "boxes": (Problem.of(1, 24, 8, (12, 16), 1), sm90_area.COPY_BOXES),
    "boxes of every few rows": (Problem.of(1, 16, 8, (7, 27), 1), sm90_area.COPY_ROWS),
    "4 bytes at a time": (Problem.of(1, 10, 8, (7, 27), 1), 1),
    "channels_last": (Problem.of(1, 32, 8, (12, 16), 1, channels_last=True), 0),
    "two depths": (Problem.of(1, 8, 8, (3, 8, 8), (2, 1, 1)), sm90_area.COPY_BOXES),
}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("sizes", [(-1, 5), (-36, 0), (-40, 36), (28, 35), (-43, -37)])
def test_numbers_of_every_size_keep_their_bits(
    library: ctypes.CDLL, name: str, sizes: tuple[int, int]
) -> None:
    """FP16 ends at 65504: each pixel has a size of its own, and all are as exact as float32."""
    problem, copy = RANGES[name]
    chosen = [found for found in tilings(TASKS["forward"](problem)) if found[2].area.copy == copy]
    rng = np.random.default_rng(0)
    places = int(np.prod(problem.in_size[-2:]))
    size = 10.0 ** rng.permutation(np.linspace(*sizes, places)).reshape(problem.in_size[-2:])
    shape = 1, problem.in_channels, *problem.in_size
    x = (rng.uniform(0.5, 1, shape) * size).astype(np.float32)
    w = rng.uniform(-1, 1, (problem.in_channels, 8, *problem.kernel)).astype(np.float32)
    w *= 10.0 ** rng.integers(-3, 1, (1, 8, *[1] * problem.ndim))  # every channel, too
    exact = x.astype(np.float64), w.astype(np.float64)
    wanted = expected(problem, *exact, np.zeros(8))
    largest = expected(problem, *map(np.abs, exact), np.zeros(8))  # if nothing cancelled
    for found in (chosen[0], chosen[-1]):
        record, last = sm90.record(*found), problem.channels_last
        y = sm90_on_cpu.run(
            library, record, x, w, None, wanted.shape, MULTIPROCESSORS, channels_last=last
        )
        error = np.abs(y - wanted) - 2.0**-137  # denormal numbers have fewer bits
        assert (error / largest).max() < 3e-7


LINES = {
    "one channel, nine phases": Problem.of(1, 12, 1, (9, 13), 9, 3, 4, 2, tf32=True),
    "three channels, stride 2": Problem.of(2, 16, 3, (7, 40), 4, 2, 1, dtype="bfloat16"),
    "five channels, stride 1": Problem.of(2, 10, 5, (9, 30), 3, tf32=True),
    "groups of eight, depth": Problem.of(1, 16, 16, (3, 4, 9), (3, 5, 7), 2, 3, 1, groups=2),
    "stride 5, two phases without taps": Problem.of(1, 9, 70, (4, 27), 3, 5, 1, 0, 2, tf32=True),
    "stride 7, odd width": Problem.of(2, 8, 20, (3, 18), (2, 6), (1, 7), (0, 2), dtype="bfloat16"),
    "stride (2, 3) in groups": Problem.of(
        1, 16, 32, (8, 21), (3, 5), (2, 3), (1, 2), 0, (2, 1), 2, tf32=True
    ),
}


PAIRS = {
    "whole rows": Problem.of(3, 16, 72, (8, 8), 4, 2, 1, tf32=True),
    "16 bits": Problem.of(2, 24, 40, (9, 20), 4, 2, 1, dtype="bfloat16"),
    "odd rows": Problem.of(2, 16, 100, (5, 21), 3, 2, 1, tf32=True),
    "odd rows of 16 bits": Problem.of(1, 16, 20, (7, 13), (3, 5), 2, 1, dtype="bfloat16"),
    "depth and groups": Problem.of(2, 16, 32, (3, 4, 9), 2, 2, groups=2, tf32=True),
    "one row": Problem.of(2, 8, 130, (300,), 4, 2, 1, dtype="bfloat16"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_consumers_store_the_two_width_phases_together(library: ctypes.CDLL, name: str) -> None:
    problem = PAIRS[name]
    chosen = [found for found in tilings(TASKS["forward"](problem)) if found[2].paired]
    by_width = {found[2].n: found for found in chosen}
    assert {216, 256} <= set(by_width)  # of 32 columns an odd number of chunks, and an even one
    for shape, job_list, tiling in by_width.values():
        check_result(library, problem, "forward", sm90.record(shape, job_list, tiling), 0)


@pytest.mark.parametrize("rings", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_several_groups_of_jobs_stay(
    library: ctypes.CDLL, dtype: str, rings: int
) -> None:
    """Two blocks of threads, and as many groups: each keeps the weights of its own."""
    problem = Problem.of(5, 8, 128 * rings, (6, 40), (1, 3), dtype=dtype, tf32=True)
    chosen = [
        found
        for found in tilings(TASKS["forward"](problem))
        if found[2].weights.resident
        and found[2].job_groups == 2
        and found[2].weights.rings == rings
    ]
    assert chosen
    for shape, job_list, tiling in (chosen[0], chosen[len(chosen) // 2], chosen[-1]):
        check_result(library, problem, "forward", sm90.record(shape, job_list, tiling), 0)


@pytest.mark.parametrize("name", LINES)
def test_lines_hold_their_width_phases_side_by_side(library: ctypes.CDLL, name: str) -> None:
    """Few channels, more than two width phases: folds of any size, stored by lines."""
    problem = LINES[name]
    chosen = [found for found in tilings(TASKS["forward"](problem)) if found[1][0].lines]
    best = min(chosen, key=lambda found: found[2].cycles)
    for shape, job_list, tiling in (chosen[0], best, chosen[-1]):
        check_result(library, problem, "forward", sm90.record(shape, job_list, tiling), 0)


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_gradients_of_few_input_channels_are_stored_by_lines(
    library: ctypes.CDLL, channels: int
) -> None:
    problem = Problem.of(2, channels, 16, (9, 20), 4, 2, 1, tf32=True)
    chosen = [found for found in tilings(TASKS["grad_input"](problem)) if found[1][0].lines]
    for shape, job_list, tiling in (chosen[0], chosen[len(chosen) // 2], chosen[-1]):
        check_result(library, problem, "grad_input", sm90.record(shape, job_list, tiling), 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("stride", "dilation"), [((1, 2, 2), (1, 2, 2)), ((2, 2, 1), (2, 2, 1)), ((3, 5, 2), (1, 1, 2))]
)
def test_depths_and_rows_without_taps_are_filled(
    library: ctypes.CDLL, stride: tuple[int, ...], dilation: tuple[int, ...], dtype: str
) -> None:
    """No unit of work computes them, and rows of odd length begin anywhere."""
    extra = tuple(s - 1 for s in stride)
    problem = Problem.of(2, 8, 9, (3, 4, 7), 2, stride, 1, extra, dilation, dtype=dtype, tf32=True)
    task = TASKS["forward"](problem)
    assert any(task.fills)
    chosen = tilings(task)
    for first, (shape, job_list, tiling) in enumerate((chosen[0], chosen[-1])):
        record = list(sm90.record(shape, job_list, tiling))
        record[list(tiling.fields(shape)).index("fill_first")] = first
        check_result(library, problem, "forward", tuple(record), 0)


@pytest.mark.parametrize("channels", [1, 5, 24])
@pytest.mark.parametrize("rows", [5, 6])
def test_rows_behind_the_last_one_with_taps_are_filled(
    library: ctypes.CDLL, channels: int, rows: int
) -> None:
    """The row of the next lane, or lattice point, which would fill them does not exist."""
    problem = Problem.of(2, 20, channels, (rows, 9), (1, 2), (2, 2), (1, 0), 0, 2, tf32=True)
    chosen = tilings(TASKS["forward"](problem))
    for shape, job_list, tiling in {found[0]: found for found in chosen}.values():
        check_result(library, problem, "forward", sm90.record(shape, job_list, tiling), 0)


SHIFTED = {
    "every second column": Problem.of(2, 8, 40, (140,), 3, 2, 1, 0, 2, tf32=True),
    "the same in 16 bits": Problem.of(2, 8, 70, (140,), 3, 2, 1, 0, 2, dtype="bfloat16"),
    "both columns": Problem.of(1, 8, 24, (2, 131), 3, 2, 1, tf32=True),
    "stride 5": Problem.of(1, 8, 70, (2, 127), 3, 5, 1, 0, 2, dtype="bfloat16"),
    "float32 unrounded": Problem.of(1, 8, 17, (150,), 3, 2, 1, 0, 2),
    "short rows": Problem.of(2, 8, 20, (1,), 4, 3, 1, tf32=True),
}


@pytest.mark.parametrize("name", SHIFTED)
def test_lines_are_stored_in_whole_vectors_wherever_they_begin(
    library: ctypes.CDLL, name: str
) -> None:
    """Rows of odd length: each channel begins elsewhere in 16 bytes."""
    problem = SHIFTED[name]
    shifted = []
    for shape, job_list, tiling in tilings(TASKS["forward"](problem)):
        record = sm90.record(shape, job_list, tiling)
        if record[list(tiling.fields(shape)).index("shifted")]:
            shifted.append((tiling.cycles, record))
    best = min(shifted)[1]
    for record in (shifted[0][1], best, shifted[-1][1]):
        check_result(library, problem, "forward", record, 0)


@pytest.mark.parametrize("direction", TASKS)
@pytest.mark.parametrize("channels", [3, 16])
def test_depths_are_folded_beside_rows(library: ctypes.CDLL, direction: str, channels: int) -> None:
    """Five depths: the last block has one that does not exist."""
    problem = Problem.of(1, 16, channels, (4, 6, 10), (2, 3, 3), tf32=True)
    if direction == "grad_input":
        problem = Problem.of(1, channels, 16, (5, 6, 10), (2, 3, 3), tf32=True)
    chosen = [found for found in tilings(TASKS[direction](problem)) if found[0].depth_lanes > 1]
    for shape, job_list, tiling in {found[0]: found for found in chosen}.values():
        check_result(library, problem, direction, sm90.record(shape, job_list, tiling), 0)
    assert {shape.depth_lanes for shape, _, _ in chosen} >= {2, 4}


def test_rows_past_the_input_do_not_read_another_channel(library: ctypes.CDLL) -> None:
    """Output padding adds a row behind an image that is one long row to the TMA."""
    sizes: tuple[Any, ...] = ((2, 3, 3), (4, 4, 2), (1, 0, 1), (1, 2, 0), (3, 1, 1))
    problem = Problem.of(2, 16, 48, (1, 1, 1), *sizes, groups=2, dtype="bfloat16")
    chosen = tilings(TASKS["forward"](problem))
    for shape, job_list, tiling in (chosen[0], chosen[-1]):
        check_result(library, problem, "forward", sm90.record(shape, job_list, tiling), 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [40, 150])
def test_the_only_width_phase_with_taps_is_stored_with_the_other(
    library: ctypes.CDLL, width: int, dtype: str
) -> None:
    """Stride 2 and dilation 2: every second column is the bias alone."""
    problem = Problem.of(2, 16, 24, (3, width), 3, 2, 1, 0, 2, dtype=dtype, tf32=True)
    chosen = [
        found
        for found in tilings(TASKS["forward"](problem))
        if found[2].blocks == 1 and found[1][0].together
    ]
    for shape, job_list, tiling in (chosen[0], chosen[len(chosen) // 2], chosen[-1]):
        check_result(library, problem, "forward", sm90.record(shape, job_list, tiling), 0)
