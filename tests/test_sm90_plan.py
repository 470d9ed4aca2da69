"""The Hopper kernel's plan, as far as a machine without a GPU can test it.

The emulator (sm90_emulator.py) reads nothing but the integers of the plan, as the kernel does.
"""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sm90_emulator as emulator
import sm90_pipeline as pipeline
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_reports import spilled_bytes
from sm90_references import TASKS, expected, expected_grad_input, problems

from upconv.planner import (
    H200,
    Candidate,
    Problem,
    Refusal,
    make_plan,
    sm90,
    sm90_area,
    sm90_load,
    sm90_search,
    sm90_task,
    sm90_tiling,
)
from upconv.planner.sm90_task import forward_task
from upconv.planner.sm90_tiling import FIXED_BYTES, SPLIT_TILES, TILES
from upconv.planner.sm90_weights import MAX_STAGES, STAGE_BYTES

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "upconv" / "csrc" / "cuda"


def candidate(
    problem: Problem, multiprocessors: int = 132, direction: str = "forward"
) -> Candidate:
    hardware = replace(H200, multiprocessors=multiprocessors)
    assert sm90.legality(problem, hardware) is None
    answer = sm90.consider_task(TASKS[direction](problem), hardware)
    assert isinstance(answer, Candidate), answer
    return answer


def check(problem: Problem, multiprocessors: int, direction: str = "forward") -> None:
    """The emulated kernel computes what PyTorch does."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(
        (problem.in_channels, problem.out_channels // problem.groups, *problem.kernel)
    )
    params = candidate(problem, multiprocessors, direction).params
    if direction == "forward":
        x = rng.standard_normal((problem.batch, problem.in_channels, *problem.in_size))
        b = rng.standard_normal(problem.out_channels)
        y, wanted = emulator.run(params, x, w, b), expected(problem, x, w, b)
    else:
        gy = rng.standard_normal((problem.batch, problem.out_channels, *problem.out_size))
        y = emulator.run(params, gy, w, np.zeros(problem.in_channels))
        wanted = expected_grad_input(problem, gy, w)
    np.testing.assert_allclose(y.reshape(wanted.shape), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("direction", TASKS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=problems(), sms=st.sampled_from([1, 8, 132]))
def test_the_emulated_kernel_computes_the_convolution(
    direction: str, problem: Problem, sms: int
) -> None:
    check(problem, sms, direction)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("batch", "size", "kernel", "stride", "extra"),
    [
        (2, (4, 14), 2, 2, 0),
        (2, (8, 5), 2, 2, 0),
        (2, (8, 7), (2, 1), 2, 1),
        (1, (40, 10), (2, 3), 3, 0),
        (5, (8, 3), 1, 1, 0),
    ],
)
def test_rows_without_margins_are_loaded_as_one(
    batch: int, size: tuple[int, int], kernel: Any, stride: int, extra: int, dtype: str
) -> None:
    problem = Problem.of(batch, 20, 24, size, kernel, stride, 0, extra, dtype=dtype, tf32=True)
    plan = emulator.Plan(candidate(problem).params)
    assert (plan.flat, plan.copy) == (1, sm90_area.COPY_ROWS)
    check(problem, 132)


@pytest.mark.parametrize(
    ("dtype", "width", "stride", "boxes"),
    [
        ("float32", 38, 1, (1, 2, 1)),  # 40 columns: every row begins on 16 bytes
        ("float32", 40, 1, (2, 2, 2)),  # 42 floats: every second
        ("bfloat16", 40, 1, (4, 4, 4)),
        ("bfloat16", 39, 1, (8, 8, 8)),
        ("bfloat16", 40, 2, (8, 8, 4)),  # 81 columns, and only every second row is read
    ],
)
def test_rows_and_channels_that_begin_on_16_bytes_share_boxes(
    dtype: str, width: int, stride: int, boxes: tuple[int, int, int]
) -> None:
    """The gradient of the input reads 31 or 59 rows of 2 more columns, or twice as many."""
    problem = Problem.of(2, 64, 64, (29, width), 3, stride, dtype=dtype, tf32=True)
    plan = emulator.Plan(candidate(problem, direction="grad_input").params)
    classes, rows, residues = boxes
    assert plan.copy == (sm90_area.COPY_BOXES if residues == 1 else sm90_area.COPY_ROWS)
    assert plan.raw_residues == residues
    if plan.copy == sm90_area.COPY_ROWS:
        assert (plan.raw_classes, 1 << plan.raw_shift) == (classes, rows)
    check(problem, 132, "grad_input")


def test_channels_that_do_not_fill_their_classes_are_gathered() -> None:
    """33 x 33 floats: every fourth channel begins on 16 bytes, and there are 10."""
    problem = Problem.of(2, 10, 64, (33, 33), 3, tf32=True)
    plan = emulator.Plan(candidate(problem).params)
    assert plan.copy < sm90_area.COPY_BOXES
    check(problem, 132)


@pytest.mark.parametrize("direction", TASKS)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    problem=problems(), sms=st.sampled_from([1, 2, 132]), choose=st.randoms(use_true_random=False)
)
def test_no_role_of_the_kernel_waits_for_ever(
    direction: str, problem: Problem, sms: int, choose: random.Random
) -> None:
    """Any tiling, not only the chosen one, in any order of events."""
    hardware = replace(H200, multiprocessors=sms)
    choices = []
    for shape in sm90.shapes(TASKS[direction](problem)):
        by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in range(1, 5)}
        for tiling in sm90_search.tilings(shape, by_blocks, hardware):
            choices.append((shape, by_blocks[tiling.blocks], tiling))
    for shape, job_list, tiling in choose.sample(choices, min(len(choices), 3)):
        assert job_list is not None
        pipeline.play(sm90.record(shape, job_list, tiling), sms, choose.randrange(1 << 30))


def check_limits(plan: emulator.Plan) -> None:
    emulator.check_vectors(plan)
    slot = plan.parts * plan.slice_blocks * plan.block_pitch * 16
    raw = plan.raw_chunks * plan.raw_bytes if plan.copy >= 3 else sm90_area.GATHER_BYTES
    tables = -(-(len(plan.pairs) * 4 + len(plan.visits) * 48) // 128) * 128
    rings = raw + plan.rings * plan.stages * STAGE_BYTES + plan.slots * slot
    assert FIXED_BYTES + tables + rings <= 227 * 1024
    assert (plan.tile_n, plan.job_blocks) in (SPLIT_TILES if plan.parts == 2 else TILES)
    assert plan.slice_blocks in range(2, 17, 2)
    assert plan.copy >= 3 or plan.slice_blocks in (2, 4, 8, 12, 16)
    assert 2 <= plan.slots <= 16
    assert plan.resident or plan.stages >= 3, "two steps stay in flight behind the newest one"
    assert plan.rings * plan.stages <= MAX_STAGES
    assert plan.pixels <= sm90_tiling.MAX_PIXELS
    assert plan.block_pitch >= plan.pixels
    for table in ("pairs", "kinds", "visits", "jobs"):
        limit = emulator.header_constant(f"kMax{table.capitalize()}")
        assert len(getattr(plan, table)) <= limit
    lists = [pairs for visit in plan.visits for side in visit["lists"] for pairs in side]
    assert all(begin % 4 == 0 for begin, _ in lists)
    assert plan.tiles_z * plan.out_step_z >= plan.out_d
    assert plan.tiles_y * plan.tile_h * plan.out_step_y >= plan.out_h
    assert plan.tiles_x * plan.tile_w * plan.out_step_x >= plan.out_w


@pytest.mark.parametrize("direction", TASKS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(problem=problems((2, 3)), h=st.integers(1, 300), w=st.integers(1, 300))
def test_every_plan_keeps_the_limits_of_the_kernel(
    direction: str, problem: Problem, h: int, w: int
) -> None:
    problem = replace(problem, in_size=(*problem.in_size[:-2], h, w))
    assume(min(problem.out_size) > 0)
    check_limits(emulator.Plan(candidate(problem, direction=direction).params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_group_does_not_see_the_numbers_of_the_next(dtype: str) -> None:
    """Channels that fill up a block are zeros: even a zero weight would pass a NaN on."""
    problem = Problem.of(2, 3 * 10, 3 * 9, (6, 8), 3, 2, groups=3, dtype=dtype, tf32=True)
    x = np.ones((2, 30, 6, 8))
    x[:, 10:20] = np.nan
    w, b = np.ones((30, 9, 3, 3)), np.ones(27)
    y = emulator.run(candidate(problem).params, x, w, b)
    np.testing.assert_array_equal(
        np.isnan(y[:, :, 0, 1, 1]).any(0), [False] * 9 + [True] * 9 + [False] * 9
    )
    assert not np.isnan(y[:, [*range(9), *range(18, 27)]]).any()


@pytest.mark.parametrize(
    ("direction", "kernel", "stride", "planes"),
    [
        ("forward", (2, 3, 4), (1, 1, 1), 2),
        ("grad_input", 4, 2, 16),
        ("grad_input", 3, (3, 2, 1), 6),
    ],
)
def test_depths_and_residues_are_planes(
    direction: str, kernel: Any, stride: Any, planes: int
) -> None:
    problem = Problem.of(1, 16, 16, (4, 8, 8), kernel, stride, 1, dtype="bfloat16")
    plan = emulator.Plan(candidate(problem, direction=direction).params)
    assert len({tuple(visit["plane"]) for visit in plan.visits}) == planes


@pytest.mark.parametrize("stride", [(5, 5), (5, 6), (6, 5), (6, 6), (8, 4), (4, 8), (31, 1)])
@pytest.mark.parametrize("out_channels", [16, 64, 192])
def test_many_phases_fit_the_tables_or_are_refused(
    stride: tuple[int, int], out_channels: int
) -> None:
    problem = Problem.of(2, 16, out_channels, (9, 9), 8, stride, dtype="bfloat16")
    answer = sm90.consider(problem, H200)
    if isinstance(answer, Refusal):
        assert "too many taps or phases" in answer.reason
        return
    plan = emulator.Plan(answer.params)
    check_limits(plan)


def test_one_dimension_is_a_single_row() -> None:
    flat = Problem.of(2, 16, 24, (40,), 5, 2, 1, 1, dtype="bfloat16")
    plan = emulator.Plan(candidate(flat).params)
    assert (plan.in_h, plan.in_w, plan.out_h, plan.out_w) == (1, 40, 1, *flat.out_size)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"groups": 4}, "in_channels of a group = 4"),
        ({"in_channels": 4}, "in_channels = 4"),
        ({"out_channels": 4, "direction": "grad_input"}, "out_channels = 4"),
        ({"in_channels": 10, "channels_last": True}, "multiples of 4"),
        ({"batch": 0}, "nothing to compute"),
        (
            {"channels_last": True, "output_padding": (1, 0), "dilation": (2, 2)},
            "output_padding >= stride",
        ),
    ],
)
def test_refusals_say_why(change: dict[str, object], words: str) -> None:
    problem = replace(Problem.of(2, 16, 16, (8, 8), 3, tf32=True), **change)  # type: ignore[arg-type]
    answer = sm90.consider(problem, H200)
    assert isinstance(answer, Refusal)
    assert words in answer.reason


def test_sums_that_would_leave_the_range_of_split_numbers_are_refused() -> None:
    problem = Problem.of(1, 8192, 8, (4, 4), 5, 1, 2)
    refusal = sm90.consider(problem, H200)
    assert isinstance(refusal, Refusal)
    assert "204800 products" in refusal.reason
    for other in (replace(problem, tf32=True), replace(problem, in_channels=4096)):
        assert sm90.legality(other, H200) is None


def test_other_gpus_are_refused_by_their_capability() -> None:
    problem = Problem.of(2, 16, 16, (8, 8), 3, tf32=True)
    answer = sm90.consider(problem, replace(H200, capability=(8, 9)))
    assert isinstance(answer, Refusal)
    assert "8.9" in answer.reason


def test_a_forced_plan_takes_the_kernel_and_a_free_one_weighs_it_against_pytorch() -> None:
    small = Problem.of(1, 8, 8, (4, 4), 3, tf32=True, channels_last=True)
    assert make_plan(small, H200, forced=sm90.KERNEL).kernel == sm90.KERNEL
    free = make_plan(small, H200)
    assert free.kernel == "aten"
    assert any(r.kernel == sm90.KERNEL and "slower" in r.reason for r in free.refused)
    big = Problem.of(64, 64, 128, (128, 256), (3, 5), tf32=True)
    assert make_plan(big, H200).kernel == sm90.KERNEL


@pytest.mark.parametrize(
    ("channels", "pixels", "slice_blocks", "wanted"),
    [
        (1024, 128, 16, (8, 2)),  # 16 slices
        (1024, 128, 8, (8, 2)),
        (128, 128, 16, (4, 4)),  # 2 slices
        (1024, 132, 16, (4, 3)),  # a block of more than 2 KB
        (1024, 64, 16, (8, 4)),  # 8 blocks are as many as there may be
    ],
)
def test_small_tiles_of_many_slices_come_in_large_boxes(
    channels: int, pixels: int, slice_blocks: int, wanted: tuple[int, int]
) -> None:
    problem = Problem.of(1, channels, 64, (1, 4096), (1, 2), (1, 2), tf32=True)
    shape = next(iter(sm90.shapes(forward_task(problem))))
    area = sm90_area.Area(1, 1, pixels, pixels, 1, pixels, 4, sm90_area.COPY_BOXES, 1)
    bytes_read = slice_blocks * pixels * 16
    rings = [
        list(sm90_area.raw_rings(shape, area, slice_blocks, times * bytes_read / 128))
        for times in (2.0, 10.0, 20.0)
    ]
    ((box, total),) = rings[1]
    assert (box.raw_blocks, box.raw_chunks) == wanted
    assert total == box.raw_bytes * box.raw_chunks <= sm90_area.BOX_RINGS[0][1]
    # What is read more often comes in smaller boxes, what is read rarely in larger ones.
    assert rings[2][0][0].raw_bytes <= sm90_area.BOX_RINGS[0][0]
    assert rings[0][0][0].raw_bytes >= box.raw_bytes
    assert (box, total) in rings[0]
    order = [(-each.raw_blocks, each.raw_chunks) for each, _ in rings[0]]
    assert order == sorted(set(order)), "large boxes first, and of equals the shortest ring"


def strips(*layer: Any, n: int = 256, **rest: Any) -> list[sm90_area.Area]:
    """The areas of a layer's tiles whose rows lie in strips."""
    shape = sm90.shapes(forward_task(Problem.of(*layer, tf32=True, **rest)))[0]
    return [a for a in sm90_area.areas(shape, n, 4) if a.in_strips]


def test_rows_lie_in_strips_where_that_saves_products() -> None:
    found = strips(8, 64, 64, (64, 64), 3, 1, 1)
    assert {(a.strip, a.width % 8) for a in found} == {(10, 0)}
    # One image of 8 columns: the margin of a row is that of the next as well.
    assert {a.strip for a in strips(8, 64, 64, (8, 8), 3, 1, 1)} == {9}
    # No tap reaches another column; no TMA.
    assert not strips(8, 64, 64, (64, 64), 2, 2)
    assert not strips(8, 64, 64, (64, 64), (3, 1))
    assert not strips(8, 64, 64, (64, 64), 3, 1, 1, channels_last=True)


def test_columns_that_are_not_stored_stay_in_the_slack_behind_the_tile() -> None:
    for n in (64, 128, 184, 216, 240, 256):
        for size in ((5, 24), (40, 8), (64, 200), (100, 75)):
            for area in strips(3, 32, 32, size, 7, 1, 3, n=n):
                groups = (n - area.used_columns) // sm90_area.GROUP
                assert groups * area.strip * 16 <= 4096


def test_planner_and_header_agree_on_fields_and_limits() -> None:
    shape = sm90.shapes(forward_task(Problem.of(1, 8, 8, (4, 4), 3, tf32=True)))[0]
    by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in range(1, 5)}
    tiling = next(sm90_search.tilings(shape, by_blocks, H200))
    assert list(tiling.fields(shape)) == emulator.header_fields()
    for name, value in {
        "kMaxKinds": sm90_load.MAX_KINDS,
        "kMaxPairs": sm90_load.MAX_PAIRS,
        "kMaxVisits": sm90_load.MAX_VISITS,
        "kMaxJobs": sm90_load.MAX_JOBS,
        "kMaxRowPhases": sm90_task.MAX_ROW_PHASES,
        "kMaxWidthPhases": sm90_task.MAX_WIDTH_PHASES,
        "kMaxBlocks": sm90_load.MAX_BLOCKS,
        "kStepPairs": sm90_load.STEP_PAIRS,
    }.items():
        assert emulator.header_constant(name) == value


@pytest.mark.parametrize(
    ("operands", "parts", "tiles"),
    [
        (("tf32", "bf16", "fp16"), ("WIDE", "NARROW", "DOUBLE"), TILES),
        (("split",), ("SPLIT_WIDE", "SPLIT_NARROW"), SPLIT_TILES),
        (("tf32", "bf16", "fp16"), ("WIDE_ROW", "DOUBLE_ROW"), sm90_area.ROW_TILES),
        (("split",), ("SPLIT_ROW",), sm90_area.SPLIT_ROW_TILES),
    ],
)
def test_planner_and_kernel_agree_on_the_tiles(
    operands: tuple[str, ...], parts: tuple[str, ...], tiles: tuple[tuple[int, int], ...]
) -> None:
    """Every tile is in one part, and every part but the first is compiled by a file of its own."""
    text = (CUDA / "sm90_launch.cuh").read_text()
    listed = []
    for part in parts:
        line = re.search(rf"define UPCONV_SM90_{part}_TILES\(X\)(.*)\n", text)
        assert line
        listed += [(int(n), int(mb)) for n, mb in re.findall(r"X\((\d+), (\d+)\)", line.group(1))]
    assert sorted(listed) == sorted(tiles)
    for operand in operands:
        main = (CUDA / f"sm90_{operand}.cu").read_text()
        rows = "ROWS_" * (tiles in (sm90_area.ROW_TILES, sm90_area.SPLIT_ROW_TILES))
        for part in parts if rows else parts[1:]:
            name = part.split("_")[-1].lower()
            if rows:
                name = "rows_double" if part == "DOUBLE_ROW" else "rows"
            assert f"UPCONV_SM90_{part}_TILES(UPCONV_SM90_{rows}ELSEWHERE)" in main
            own = (CUDA / f"sm90_{operand}_{name}.cu").read_text()
            assert f"UPCONV_SM90_{part}_TILES(UPCONV_SM90_{rows}HERE)" in own


def test_the_generated_header_is_what_its_generator_writes() -> None:
    namespace: dict[str, object] = {"__name__": "generator"}
    exec((ROOT / "tools" / "generate_wgmma.py").read_text(), namespace)
    assert (CUDA / "wgmma.cuh").read_text() == namespace["text"]()  # type: ignore[operator]
    widths = {n for n, _ in TILES}
    assert widths == set(namespace["WIDTHS"])  # type: ignore[call-overload]
    halves = {n // 2 for n, _ in SPLIT_TILES}
    assert halves == set(namespace["SPLIT_WIDTHS"])  # type: ignore[call-overload]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize(
    ("operand", "rows"),
    [("Tf32", "false"), ("Bf16", "false"), ("Split", "false"), ("Tf32", "true"), ("Bf16", "true")],
)
def test_the_kernel_compiles_without_spills_in_the_main_loop(
    operand: str, rows: str, tmp_path: Path
) -> None:
    """The widest tile of each operand. ptxas counts spills of the whole kernel; the few bytes that
    are allowed lie in the set-up and the epilogue, once a unit of tens of thousands of cycles."""
    source = tmp_path / "kernel.cu"
    source.write_text(
        '#include "sm90_launch.cuh"\nnamespace upconv {\n'
        f"template __global__ void sm90_wgmma_fprop<{operand}, 256 / {operand}::kShares, 1, {rows}>"
        "(const __grid_constant__ Sm90Params, const __grid_constant__ CUtensorMap);\n}\n"
    )
    assert max(spilled_bytes(source, tmp_path)) <= 128
