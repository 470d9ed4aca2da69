"""The own source of the kernel for few output channels, run on the CPU thread by thread.

As tests/test_gather_source.py: tensors lie between NaNs, the output and shared memory start as
NaNs, copies happen as late as they may.
"""

from __future__ import annotations

import ctypes
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from test_direct_host import OPERATORS
from test_gather_source import GUARD, INCLUDE, LIMIT, SPLIT_LIMIT, compiled, fenced

from upconv.configurations import draw
from upconv.planner import H200, Problem, overlap

Run = Callable[..., torch.Tensor]

pytestmark = pytest.mark.skipif(
    not INCLUDE.exists() or not shutil.which("g++"), reason="needs g++ and CUDA's headers"
)


def built(folder: Path) -> ctypes.CDLL:
    shared = ("divider.h", "operands.h", "ordered_sum.cuh", "plan_reader.h")
    sources = ("mma_*", "gather_*", "overlap_*", *shared)
    library = compiled(folder, "overlap_driver.cpp", *sources)
    pointer = ctypes.c_void_p
    library.overlap_emulate.argtypes = [pointer, ctypes.c_int64, ctypes.c_int, *[pointer] * 6]
    return library


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    library = built(tmp_path_factory.mktemp("overlap"))

    def call(
        way: overlap.Division,
        backwards: bool,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        problem, record = way.problem, overlap.record(way)
        integers = (ctypes.c_int64 * len(record))(*record)
        shape = (problem.batch, problem.out_channels, *problem.out_size)
        buffer, places = fenced(x, w, *([] if bias is None else [bias]))
        begin = buffer.data_ptr()
        end = begin + buffer.numel() * buffer.element_size()
        result, results = fenced(torch.full(shape, float("nan"), dtype=x.dtype))
        order = (*places, *([None] if bias is None else []), *results, begin, end)
        assert library.overlap_emulate(integers, len(record), int(backwards), *order) == 0
        assert bool(result[:GUARD].isnan().all() and result[-GUARD:].isnan().all())
        return result[GUARD:-GUARD].view(shape)

    return call


def tensors(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    dtype = getattr(torch, problem.dtype)
    each = problem.out_channels // problem.groups
    x = torch.randn(problem.batch, problem.in_channels, *problem.in_size).to(dtype)
    w = torch.randn(problem.in_channels, each, *problem.kernel).to(dtype)
    return x, w, torch.randn(problem.out_channels).to(dtype) if problem.bias else None


def layer(problem: Problem, *operands: torch.Tensor | None) -> torch.Tensor:
    rest = (problem.stride, problem.padding, problem.output_padding)
    return OPERATORS[problem.ndim - 1](*operands, *rest, problem.groups, problem.dilation)


def compare(run: Run, way: overlap.Division, orders: tuple[bool, ...] = (False,)) -> None:
    operands = tensors(way.problem)
    expected = layer(way.problem, *(None if t is None else t.double() for t in operands))
    results = [run(way, backwards, *operands) for backwards in orders]
    assert bool(results[0].isfinite().all()), "an output was not written, or read from outside"
    distance = (results[0].double() - expected).norm() / expected.norm().clamp_min(1e-30)
    limit = SPLIT_LIMIT if way.problem.strict else LIMIT[way.problem.dtype]
    assert float(distance) <= limit, way
    assert all(map(results[0].equal, results)), "the result depends on the order of the blocks"


def ways(problem: Problem, multiprocessors: int) -> list[overlap.Division]:
    machine = replace(H200, multiprocessors=multiprocessors)
    contiguous = replace(problem, channels_last=False)
    if overlap.legality(contiguous, machine):
        return []
    return list(overlap.divisions(contiguous, machine))


@pytest.mark.parametrize("seed", range(4))
def test_drawn_problems(seed: int, run: Run) -> None:
    """Every type and number of dimensions; the chosen division, and any other."""
    choose, compared = random.Random(seed), 0
    for configuration in islice(draw(1400 + seed), 24):
        drawn = replace(configuration.problem, tf32=choose.random() < 0.6)
        found = ways(drawn, choose.choice([1, 3]))
        if not found:
            continue
        compare(run, min(found, key=lambda way: way.microseconds), (False, True))
        compare(run, choose.choice(found))
        compared += 1
    assert compared >= 5


LAYERS = {
    "super-resolution": Problem.of(1, 13, 1, (5, 40), 9, 3, 4, 2),
    "generator": Problem.of(2, 18, 3, (6, 9), 4, 2, 1),
    "decoder": Problem.of(1, 9, 2, (5, 70), 3, 2, 1, 1),
    "vocoder": Problem.of(1, 20, 1, (333,), 7, 1, 3),
    "volume": Problem.of(1, 8, 1, (3, 4, 24), (2, 3, 5), (2, 1, 2), (0, 1, 2)),
    "dilated": Problem.of(1, 8, 2, (9, 33), (3, 4), (2, 3), (1, 4), 0, (2, 2)),
    "rows without taps": Problem.of(1, 8, 2, (5, 33), (1, 3), (2, 1)),
    "columns without taps": Problem.of(1, 8, 2, (5, 33), (3, 2), (1, 5)),
    "groups": Problem.of(2, 20, 4, (5, 16), 5, 2, 2, 1, 1, 4),
    "outputs beyond the taps": Problem.of(1, 8, 1, (3, 8), 1, 3, 0, 2),
}


@pytest.mark.parametrize("dtype", ["tf32", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, dtype: str, run: Run) -> None:
    """Each by every tile and number of stages, in one division of middling size."""
    tf32, dtype = dtype == "tf32", "float32" if dtype == "tf32" else dtype
    problem = replace(LAYERS[name], dtype=dtype, tf32=tf32)
    by_tile: dict[tuple[int, ...], list[overlap.Division]] = {}
    for way in ways(problem, 2):
        by_tile.setdefault((way.tiles_m, way.tiles_n, way.stages), []).append(way)
    assert by_tile or problem.strict
    for found in by_tile.values():
        compare(run, found[len(found) // 2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["super-resolution", "decoder", "dilated", "groups"])
def test_what_meets_no_weight_does_not_matter(name: str, dtype: str, run: Run) -> None:
    """An infinite input spoils what PyTorch says that it meets, and nothing else."""
    problem = replace(LAYERS[name], dtype=dtype, tf32=True)
    x, w, bias = tensors(problem)
    x[0, 1, problem.in_size[0] // 2, problem.in_size[1] // 2] = float("inf")
    expected = layer(problem, x.float(), w.float(), None if bias is None else bias.float())
    found = ways(problem, 1)
    for way in (found[0], found[-1]):
        assert torch.equal(run(way, False, x, w, bias).isfinite(), expected.isfinite())
