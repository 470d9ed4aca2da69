"""The own source of the mma.sync kernels for the gradients, run on the CPU thread by thread.

Tensors and workspace lie between NaNs and start as NaNs, and so does shared memory: what is read
outside of them, or before it was written, shows. Copies happen as late as they may.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from test_direct_wgrad_host import expected_gradient

from upconv.configurations import draw
from upconv.planner import H200, Problem, gather, gather_igrad, gather_wgrad

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "upconv" / "csrc" / "cuda"
STAND_INS = ROOT / "tests" / "cuda_on_cpu"
INCLUDE = Path("/usr/local/cuda/include")
GUARD = 64
# Relative to the norm: operands rounded to TF32, or not, results rounded to 16 bits.
LIMIT = {"float32": 6e-4, "bfloat16": 4e-3, "float16": 6e-4}
SPLIT_LIMIT = 1e-6

Division = gather_wgrad.Division | gather_igrad.Division
Run = Callable[..., torch.Tensor]

pytestmark = pytest.mark.skipif(
    not INCLUDE.exists() or not shutil.which("g++"), reason="needs g++ and CUDA's headers"
)


def compiled(folder: Path, driver: str, *patterns: str) -> ctypes.CDLL:
    """A driver of tests/cuda_on_cpu with the kernels' own sources, by their patterns."""
    theirs = [file for pattern in patterns for file in CUDA.glob(pattern)]
    for source in (*theirs, *STAND_INS.iterdir()):
        shutil.copy(source, folder)  # the stand-ins replace what they stand in for
    target = folder / "kernels.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-DEMULATED_ARCH=900"]
    command += ["-Wno-unknown-pragmas", f"-I{folder}", f"-I{INCLUDE}"]
    done = subprocess.run(
        [*command, str(folder / driver), "-o", str(target)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(target))


def built(folder: Path) -> ctypes.CDLL:
    sources = ("mma_*", "gather_*", "divider.h", "ordered_sum.cuh", "plan_reader.h")
    library = compiled(folder, "gather_driver.cpp", *sources)
    pointer = ctypes.c_void_p
    library.gather_emulate.argtypes = [pointer, ctypes.c_int64, ctypes.c_int, *[pointer] * 6]
    library.gather_bytes.argtypes = [pointer, ctypes.c_int64]
    library.gather_bytes.restype = ctypes.c_int64
    return library


def fenced(*tensors: torch.Tensor, shift: int = 0) -> tuple[torch.Tensor, list[int]]:
    """One buffer with all of them between NaNs, each `shift` elements past a multiple of 64."""
    parts, places, length = [], [], 0
    for tensor in tensors:
        gap = GUARD + shift + -length % GUARD
        parts += [torch.full((gap,), float("nan"), dtype=tensor.dtype), tensor.reshape(-1)]
        places.append(length + gap)
        length += gap + tensor.numel()
    parts.append(torch.full((GUARD,), float("nan"), dtype=tensors[0].dtype))
    buffer = torch.cat(parts)
    return buffer, [buffer.data_ptr() + place * buffer.element_size() for place in places]


def by_weight(way: Division) -> bool:
    return isinstance(way, gather_wgrad.Division)


def result_shape(way: Division) -> tuple[int, ...]:
    problem = way.problem
    if by_weight(way):
        return (problem.in_channels, problem.out_channels // problem.groups, *problem.kernel)
    return (problem.batch, problem.in_channels, *problem.in_size)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    library = built(tmp_path_factory.mktemp("gather"))

    def call(
        way: Division, backwards: bool, other: torch.Tensor, gy: torch.Tensor, shift: int = 0
    ) -> torch.Tensor:
        """The gradient; `other` is the input, or the weight where the input's is computed."""
        module = gather_wgrad if by_weight(way) else gather_igrad
        record = module.record(way)  # type: ignore[arg-type]
        integers = (ctypes.c_int64 * len(record))(*record)
        words = way.workspace_bytes // 4 if isinstance(way, gather_wgrad.Division) else 0
        assert library.gather_bytes(integers, len(record)) == 4 * words
        shape = result_shape(way)
        buffer, inputs = fenced(other, gy, shift=shift)
        begin = buffer.data_ptr()
        end = begin + buffer.numel() * buffer.element_size()
        result, results = fenced(torch.full(shape, float("nan"), dtype=gy.dtype))
        workspace, places = fenced(torch.full((words,), float("nan")))
        order = (*inputs, *results, *places, begin, end)
        assert library.gather_emulate(integers, len(record), int(backwards), *order) == 0
        for tensor in (result, workspace):
            assert bool(tensor[:GUARD].isnan().all() and tensor[-GUARD:].isnan().all())
        return result[GUARD:-GUARD].view(shape)

    return call


def compare(run: Run, way: Division, orders: tuple[bool, ...] = (False,), shift: int = 0) -> None:
    problem = way.problem
    dtype = getattr(torch, problem.dtype)
    each = problem.out_channels // problem.groups
    shape = (problem.in_channels, each, *problem.kernel)
    if by_weight(way):
        shape = (problem.batch, problem.in_channels, *problem.in_size)
    other = torch.randn(shape).to(dtype)
    gy = torch.randn(problem.batch, problem.out_channels, *problem.out_size).to(dtype)
    expected = expected_gradient(problem, other, gy, by_weight(way))
    results = [run(way, backwards, other, gy, shift=shift) for backwards in orders]
    assert bool(results[0].isfinite().all()), "a sum was not written, or read from outside"
    distance = (results[0].double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert float(distance) <= (SPLIT_LIMIT if problem.strict else LIMIT[problem.dtype]), way
    assert all(map(results[0].equal, results)), "the result depends on the order of the blocks"


def ways(problem: Problem, multiprocessors: int) -> list[list[Division]]:
    """Every division, of the weight's gradient and of the input's."""
    machine = replace(H200, multiprocessors=multiprocessors)
    tf32 = replace(problem, channels_last=False, tf32=True, bias=False)
    if gather.legality(tf32, machine):
        return []
    weight = replace(tf32, direction="grad_weight")
    split = replace(weight, tf32=False)
    return [
        list(gather_wgrad.divisions(weight, machine)),
        list(gather_igrad.divisions(replace(tf32, direction="grad_input"), machine)),
        *([list(gather_wgrad.divisions(split, machine))] if split.strict else []),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_drawn_problems(seed: int, run: Run) -> None:
    """Every number of dimensions; the chosen division, then any other."""
    choose, compared = random.Random(seed), 0
    for configuration in islice(draw(900 + seed), 6):
        for found in ways(configuration.problem, choose.choice([1, 2])):
            if found:
                compare(run, min(found, key=lambda way: way.microseconds), (False, True))
                compare(run, choose.choice(found))
                compared += 1
    assert compared > 4


LAYERS = {
    "bilinear": Problem.of(1, 2, 2, (5, 27), 16, 8, 4, groups=2),
    "one output": Problem.of(1, 50, 1, (3, 9), (9, 5), 3, (4, 2), 2),
    "groups": Problem.of(1, 16, 32, (3, 18), (3, 5), (2, 3), (1, 2), 0, (2, 1), 2),
    "volume": Problem.of(1, 8, 8, (2, 3, 7), (2, 3, 7), 2, (1, 1, 3), 1, 1, 2),
    "signal": Problem.of(1, 4, 4, (300,), 4, 2, 1, groups=2),
    "wide kernel": Problem.of(1, 1, 1, (4, 5), (3, 45), 2, (1, 20)),
    "no output for some rows": Problem.of(1, 2, 3, (5, 6), (2, 3), 1, (3, 2), 0, (4, 1)),
    "taps without outputs": Problem.of(1, 2, 2, (1, 3), (5, 3), (4, 1), (2, 0)),
    "channels that fill nothing": Problem.of(2, 13, 11, (5, 7), 3, 2, 1, 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_by_every_tile(name: str, run: Run) -> None:
    """Both forms of the weight's gradient, and each tile, in one division of middling size."""
    dtype = ("float32", "bfloat16", "float16")[list(LAYERS).index(name) % 3]
    for found in ways(replace(LAYERS[name], dtype=dtype), 1):
        by_tile: dict[object, list[Division]] = {}
        for way in found:
            shape = getattr(way, "shape", None)
            key = (shape.by_input, shape.tile) if shape else way.tile
            by_tile.setdefault(key, []).append(way)
        assert by_tile
        for some in by_tile.values():
            compare(run, some[len(some) // 2])


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_tensors_that_begin_anywhere(shift: int, run: Run) -> None:
    """Copies are as wide as the tensors' first elements allow."""
    problem = Problem.of(1, 4, 4, (6, 24), 4, 2, 1, groups=2, dtype="bfloat16")
    both = ways(problem, 1)
    assert len(both) == 2
    for found in both:
        compare(run, min(found, key=lambda way: way.microseconds), shift=shift)


def test_margins_hold_zeros_and_not_what_lies_beside_the_tensor(run: Run) -> None:
    """A NaN next to a row, in the row before, must not reach the sums of this one."""
    problem = Problem.of(1, 1, 1, (4, 16), 3, 1, 1, dtype="bfloat16")
    found = ways(problem, 1)[1]
    weight = torch.ones(1, 1, 3, 3).bfloat16()
    gy = torch.ones(1, 1, 4, 16).bfloat16()
    gy[0, 0, 1, 15] = float("nan")
    gx = run(min(found, key=lambda way: way.microseconds), False, weight, gy)[0, 0]
    assert bool(gx[:3, 14:].isnan().all())
    assert bool(gx[:, :14].isfinite().all() and gx[3].isfinite().all())
