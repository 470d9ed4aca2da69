"""Plans of the kernel for few output channels: fields, places and shifts, bounds, refusals."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import pytest
from kernel_reports import spilled_bytes
from params_header import CUDA, ParamsHeader

from upconv.cases import CASES
from upconv.configurations import draw
from upconv.planner import (
    H200,
    Candidate,
    Problem,
    Refusal,
    make_plan,
    overlap,
    overlap_columns,
)
from upconv.planner.operands import OPERANDS
from upconv.planner.problem import three

FSRCNN = next(case for case in CASES if case.name == "fsrcnn").problem(tf32=True)


def listed(header: ParamsHeader, name: str) -> list[str]:
    found = re.search(rf"#define {name}\(X\)((?:.|\\\n)*?)\n\n", header.text)
    assert found, name
    return re.findall(r"\bX\((\w+)\)", found.group(1))


def test_planner_and_header_agree() -> None:
    header = ParamsHeader("overlap_params.h")
    way = next(overlap.divisions(FSRCNN, H200))
    assert list(overlap.scalar_fields(way)) == listed(header, "UPCONV_OVERLAP_FIELDS")
    assert listed(header, "UPCONV_OVERLAP_SHIFT_FIELDS") == ["z", "y", "tiles"]
    assert listed(header, "UPCONV_OVERLAP_SUM_FIELDS") == ["channel", "z", "y", "column", "line"]
    assert listed(header, "UPCONV_OVERLAP_PHASE_FIELDS") == ["place", "taps"]
    assert header.constant("kOverlapThreads") == 32 * max(overlap.WARPS)
    assert header.constant("kOverlapShifts") == overlap.MOST_SHIFTS
    assert header.constant("kOverlapSums") == overlap.MOST_SUMS
    assert header.constant("kOverlapPhases") == overlap.MOST_PHASES
    for name, tiles in (
        ("BOX", overlap.BOX_TILES),
        ("COPY", overlap.COPY_TILES),
        ("SPLIT", overlap.SPLIT_TILES),
    ):
        line = re.search(rf"UPCONV_OVERLAP_{name}_TILES\(X\)((?:[^\\\n]|\\\n)*)\n", header.text)
        assert line
        found = re.findall(r"X\((\d+), (\d+)\)", line.group(1))
        assert tuple((int(m), int(n)) for m, n in found) == tiles


def drawn(seed: int, count: int) -> list[overlap.Division]:
    """A way to divide each of some drawn layers."""
    found = []
    for configuration in islice(draw(seed), count):
        problem = replace(configuration.problem, channels_last=False, tf32=True)
        if overlap.legality(problem, H200) is None:
            found += list(overlap.divisions(problem, H200))[:1]
    assert len(found) > count // 5
    return found


def met(axis: overlap_columns.Axis, start: int, stride: int, out: int) -> set[tuple[int, int, int]]:
    """Every output with a tap and the input it meets, as the kernel numbers them."""
    return {
        (place * stride + phase - start, tap, place + shift)
        for place in range(axis.first, axis.first + axis.count)
        for phase, taps in enumerate(axis.phases)
        for tap, shift in taps
        if 0 <= place * stride + phase - start < out
    }


@pytest.mark.parametrize("seed", range(3))
def test_every_output_meets_its_taps_once(seed: int) -> None:
    for way in drawn(1500 + seed, 30):
        problem = way.problem
        lists = (problem.in_size, problem.kernel, problem.stride, problem.out_size)
        sizes, kernels, strides, outs = (three(values, 1) for values in lists)
        paddings, dilations = three(problem.padding, 0), three(problem.dilation, 1)
        for d, axis in enumerate(way.axes):
            start = 0 if d == 2 else paddings[d]
            pairs = product(
                range(-kernels[d] * dilations[d], outs[d] + sizes[d]), range(kernels[d])
            )
            expected = {
                (i * strides[d] - paddings[d] + k * dilations[d], k, i)
                for i, k in pairs
                if 0 <= i * strides[d] - paddings[d] + k * dilations[d] < outs[d]
            }
            found = met(axis, start, strides[d], outs[d])
            assert {pair for pair in found if 0 <= pair[2] < sizes[d]} == {
                pair for pair in expected if 0 <= pair[2] < sizes[d]
            }


@pytest.mark.parametrize("seed", range(3))
def test_what_warps_store_covers_each_place_once(seed: int) -> None:
    for way in drawn(1530 + seed, 30):
        x = way.axes[2]
        step = way.valid * way.warps_x
        first = way.first_x - x.low
        assert first <= 0
        assert first + way.tiles_x * step >= x.count > first + (way.tiles_x - 1) * step
        assert way.valid + x.margin <= way.pixels
        assert way.first_x * way.element % 16 == 0
        assert way.valid * way.element % 16 == 0


@pytest.mark.parametrize("seed", range(3))
def test_sums_share_tiles_only_with_those_that_meet_the_same_rows(seed: int) -> None:
    """Else a weight of zero would meet a number, which may be infinite."""
    for way in drawn(1560 + seed, 30):
        z, y, _ = way.axes
        shifts = {(s.z, s.y): s.tiles for s in way.columns.shifts}
        taps = way.problem.kernel[-1]
        seen: set[int] = set()
        for each in way.columns.sums:
            its = set(product((s for _, s in z.phases[each.z]), (s for _, s in y.phases[each.y])))
            assert (each.column < 0) == (not its)
            if not its:
                continue
            columns = set(range(each.column, each.column + taps))
            assert not columns & seen
            seen |= columns
            tiles = {column // 8 for column in columns}
            for shift, mask in shifts.items():
                assert {bool(mask >> tile & 1) for tile in tiles} == {shift in its}
        assert max(seen, default=0) < 8 * way.columns.tiles <= 8 * way.tiles_n
        all_tiles = (1 << way.columns.tiles) - 1
        assert [s.tiles == all_tiles for s in way.columns.shifts] == [
            index < way.columns.shifts_all for index in range(len(way.columns.shifts))
        ]


def test_plans_fit_the_machine() -> None:
    small = replace(H200, shared_memory=100 << 10, multiprocessors=40)
    for machine in (H200, small):
        for way in overlap.divisions(FSRCNN, machine):
            assert way.shared_bytes <= machine.shared_memory
            assert way.shares <= way.units
            assert 32 * way.warps <= 512


def test_it_is_chosen_where_outputs_are_few_and_refused_elsewhere() -> None:
    for dtype, tf32 in (("float32", True), ("bfloat16", False)):
        assert make_plan(replace(FSRCNN, dtype=dtype, tf32=tf32), H200).kernel == overlap.KERNEL
    dense = Problem.of(8, 64, 64, (64, 64), 3, 1, 1, tf32=True)
    for problem, machine, reason in (
        (dense, H200, "192 columns"),
        (replace(dense, kernel=(3, 5)), H200, "for other kernels"),
        (replace(FSRCNN, channels_last=True), H200, "contiguous"),
        (replace(FSRCNN, dtype="float64"), H200, "float64"),
        (replace(FSRCNN, direction="forward"), replace(H200, capability=(7, 5)), "8.0"),
        (replace(FSRCNN, batch=0), H200, "nothing"),
        (replace(FSRCNN, tf32=False, in_size=(31, 31)), H200, "16 bytes"),
        (Problem.of(1, 8, 1, (64, 64), 3, (1, 65), tf32=True), H200, "stride 65"),
        (Problem.of(1, 65536, 65536, (2, 8), 3, groups=65536, tf32=True), H200, "65535"),
        (Problem.of(1, 4096, 4, (64, 64), 5, 1, tf32=True), H200, "too many"),
        (Problem.of(1, 2, 1, (1 << 16, 1 << 15), 3, tf32=True), H200, "2^31"),
    ):
        answer = overlap.consider(problem, machine)
        assert isinstance(answer, Refusal), problem
        assert reason in answer.reason


def test_older_gpus_and_odd_rows_copy() -> None:
    ampere = replace(H200, capability=(8, 0), shared_memory=163 << 10)
    names = list(overlap.scalar_fields(next(overlap.divisions(FSRCNN, H200))))
    for problem, machine, boxes in (
        (FSRCNN, H200, 1),
        (FSRCNN, ampere, 0),
        (replace(FSRCNN, in_size=(255, 255)), H200, 0),
    ):
        answer = overlap.consider(problem, machine)
        assert isinstance(answer, Candidate)
        assert answer.params[names.index("boxes")] == boxes
        assert answer.params[names.index("type")] == OPERANDS["float32"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("operand", ["tf32", "bf16", "fp16", "split"])
def test_nothing_is_spilled(operand: str, tmp_path: Path) -> None:
    assert max(spilled_bytes(CUDA / f"overlap_{operand}.cu", tmp_path)) == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("architecture", ["80", "86", "89", "100", "120"])
def test_it_compiles_for_other_gpus(architecture: str, tmp_path: Path) -> None:
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-I{CUDA}", "-cubin"]
    command = ["nvcc", target, *flags, "-o", str(tmp_path / "a"), str(CUDA / "overlap_bf16.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
