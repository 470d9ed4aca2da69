"""Every plan that the planner makes is one that the compiled side takes: each integer has room in
its field. A field that cut one off would compute another layer, and nobody would notice.

The readers' own source (csrc/cuda/*_launch.cu) is compiled by nvcc and run on the CPU.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from upconv.cases import CASES
from upconv.planner import H200, KERNELS, Candidate, Problem, Refusal, mma, mma_tiling
from upconv.planner.plan import SERVED

CUDA = Path(__file__).resolve().parent.parent / "upconv" / "csrc" / "cuda"
MAIN = Path(__file__).resolve().parent / "cuda_on_cpu" / "plans_main.cpp"
READERS = (
    *("direct_launch", "direct_grad_launch", "depthwise_launch", "gather_launch", "mma_launch"),
    *("overlap_launch", "sm90_launch", "sm90_wgrad_launch"),
)
"""The others, of kernels whose rows are pixels, have nothing but `int` to read into."""
WHOLE = ("sm90_patch", "sm90_phases", "sm90_walk", "sm90_patch_wgrad", "sm90_phases_wgrad")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH"),
]

Plan = tuple[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("plans") / "readers"
    # What launches kernels is not reached from here, and is left out with its symbols.
    command = ["nvcc", "-std=c++17", "-O1", "--expt-relaxed-constexpr", "-t", "2"]
    command += ["-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler", "-ffunction-sections"]
    command += ["-Xlinker", "--gc-sections", f"-I{CUDA}", "-o", str(target), "-x", "cu", str(MAIN)]
    command += [str(CUDA / f"{name}.cu") for name in READERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def taken(readers: Path, plans: list[Plan]) -> list[bool]:
    lines = [f"{kernel} {len(record)} {' '.join(map(str, record))}" for kernel, record in plans]
    text = "\n".join(lines) + "\n"
    done = subprocess.run([readers], input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [answer == "1" for answer in done.stdout.split()]


def plans_of(problem: Problem) -> Iterator[Plan]:
    """Of every kernel that may serve it, in every direction."""
    for kernel, consider in KERNELS.items():
        for direction in SERVED[kernel]:
            answer = consider(replace(problem, direction=direction), H200)
            if isinstance(answer, Candidate) and kernel != "cpu_fprop":
                yield kernel, answer.params


def drawn(count: int, seed: int = 0) -> Iterator[Problem]:
    """Layers of all sizes, most of them larger than anybody's in some respect."""
    rng = random.Random(seed)
    types = (("float32", True), ("float32", False), ("bfloat16", True), ("float64", False))
    sizes = (1, 2, 3, 7, 14, 32, 65, 200, 1026, 40000, 70000)
    channels = (1, 2, 3, 4, 8, 13, 40, 64, 128, 600, 1100, 5000, 40000)
    while count:
        ndim, groups = rng.randint(1, 3), rng.choice((1, 1, 1, 2, 3, 8, 64, 1000))

        def each(*values: int, ndim: int = ndim) -> list[int]:
            return [rng.choice(values) for _ in range(ndim)]

        kernel = each(1, 2, 3, 4, 5, 7, 16, 33, 256, 1000)
        dilation = each(1, 1, 1, 2, 3, 17, 200, 20000)
        reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        dtype, tf32 = rng.choice(types)
        problem = Problem.of(
            rng.choice((1, 1, 2, 8, 65, 4096)),
            groups * rng.choice(channels),
            groups * rng.choice(channels),
            each(*sizes),
            kernel,
            each(1, 1, 2, 2, 3, 4, 5, 8, 16, 31, 100, 300, 40000),
            [rng.choice((0, 1, 2, far // 2, far)) for far in reach],
            0,
            dilation,
            groups,
            dtype=dtype,
            tf32=tf32,
        )
        if min(problem.out_size) > 0 and problem.weight_elements < 2**40:
            count -= 1
            yield problem


# Each has a number that a field of 8, 16 or 32 bits once cut off.
WIDE = [
    Problem.of(1, 16, 16, (5, 5), 256, 1, 128, tf32=True),
    Problem.of(1, 8, 8, (9,), 80001, 1, 40003, dtype="bfloat16"),
    Problem.of(1, 32768, 32768, (4, 4), 3, 1, 1, groups=2, dtype="bfloat16"),
    Problem.of(1, 512, 2560, (65,), 5, 40000, 4, 0, 2, 64, tf32=True),
    Problem.of(8, 15000, 3300, (2,), 1000, 16, 2, 0, 1, 3, dtype="bfloat16"),
]


def test_plans_of_layers_of_all_sizes_are_taken(readers: Path) -> None:
    cases = [case.problem(dtype="bfloat16") for case in CASES]
    plans = [plan for problem in (*cases, *WIDE, *drawn(200)) for plan in plans_of(problem)]
    for kernel, record in plans:
        if kernel in WHOLE:
            assert all(-(2**31) <= number < 2**31 for number in record), kernel
    narrow = [plan for plan in plans if plan[0] not in WHOLE]
    assert len({kernel for kernel, _ in narrow}) == len(KERNELS) - len(WHOLE) - 1
    for plan, fits in zip(narrow, taken(readers, narrow), strict=True):
        assert fits, plan


@pytest.mark.parametrize("problem", WIDE, ids=str)
def test_layers_beyond_a_field_are_refused(problem: Problem) -> None:
    for direction in ("forward", "grad_input"):
        assert isinstance(mma.consider(replace(problem, direction=direction), H200), Refusal)


def test_all_forms_of_tilings_are_taken(readers: Path) -> None:
    """Also of more channels than one slice has room for."""
    plans = []
    for channels in (16, 600, 1100):
        problem = Problem.of(1, channels, 16, (4, 6), 3, 2, dtype="bfloat16")
        every = list(mma_tiling.tilings(mma.works(problem), H200))
        fitting = [t for t in every if mma_tiling.fits(t, H200)]
        plans += [(mma.KERNEL, mma.record(t.work, t)) for t in fitting[::7]]
        assert len({t.warp_pixels for t in fitting}) == (2 if channels < 1100 else 1)
    assert all(taken(readers, plans))


def test_a_number_that_has_no_room_is_refused(readers: Path) -> None:
    answer = mma.consider(Problem.of(1, 16, 16, (5, 5), 3, tf32=True), H200)
    assert isinstance(answer, Candidate)
    record = list(answer.params)
    others = [[*record[:-1], 2**15], [*record, 0], record[:-1], [2**31, *record[1:]]]
    plans = [(mma.KERNEL, tuple(each)) for each in (record, *others)]
    assert taken(readers, plans) == [True, False, False, False, False]


def test_all_plans_are_read_with_a_look_at_their_fields() -> None:
    """No launch file cuts integers off by itself."""
    for path in CUDA.glob("*.cu"):
        text = path.read_text()
        if re.search(r"^bool read_\w+_plan\(", text, re.M):
            assert "PlanReader reader(record, length);" in text, path.name
            assert "record[" not in text, path.name
