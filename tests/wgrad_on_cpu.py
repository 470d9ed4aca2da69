"""The weight's gradient on Hopper by its own C++ on a CPU, as sm90_on_cpu.py does it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import sm90_on_cpu
from wgrad_references import expected

from upconv.planner import Problem

NAMES = ("tf32", "bf16", "fp16", "launch")
SOURCES = (*(f"sm90_wgrad_{name}" for name in NAMES), "wgrad_driver")


def compiled(folder: Path, sources: tuple[str, ...] = SOURCES) -> ctypes.CDLL:
    library = sm90_on_cpu.compiled(folder, sources)
    library.upconv_wgrad_run.restype = ctypes.c_char_p
    return library


def run(
    library: ctypes.CDLL, record: tuple[int, ...], x: np.ndarray, gy: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weight's and bias's gradient, flat; what no store reached is NaN."""
    operand = record[0]
    tensors = [sm90_on_cpu.aligned(sm90_on_cpu.to_bits(each, operand)) for each in (x, gy)]
    empty = (np.full(n, np.nan) for n in (size, gy.shape[1]))
    gw, gb = (sm90_on_cpu.aligned(sm90_on_cpu.to_bits(each, operand)) for each in empty)
    arguments: list[object] = []
    for tensor in tensors:
        arguments += [ctypes.c_void_p(tensor.ctypes.data), ctypes.c_int64(tensor.nbytes)]
    integers = (ctypes.c_int64 * len(record))(*record)
    failure = library.upconv_wgrad_run(
        integers,
        ctypes.c_int64(len(record)),
        *arguments,
        *(ctypes.c_void_p(each.ctypes.data) for each in (gw, gb)),
        ctypes.c_uint64(1),
    )
    assert not failure, failure.decode()
    return sm90_on_cpu.from_bits(gw, operand), sm90_on_cpu.from_bits(gb, operand)


def check(library: ctypes.CDLL, record: tuple[int, ...], problem: Problem, bias: bool) -> None:
    """The kernel computes the weight's gradient, and the bias's where its plan says so.

    The numbers are small and whole, so that TF32 makes no error at all and 16 bits only that of
    their output.
    """
    numbers = np.random.default_rng(1)
    whole = lambda *shape: numbers.integers(-3, 4, shape).astype(np.float64)  # noqa: E731
    x = whole(problem.batch, problem.in_channels, *problem.in_size)
    gy = whole(problem.batch, problem.out_channels, *problem.out_size)
    wanted = expected(problem, x, gy)
    gw, gb = run(library, record, x, gy, wanted.size)
    limit = 0 if problem.dtype == "float32" else 2**-8
    np.testing.assert_allclose(gw.reshape(wanted.shape), wanted, rtol=limit, atol=0)
    if bias:
        sums = gy.sum(tuple(i for i in range(gy.ndim) if i != 1))
        np.testing.assert_allclose(gb, sums, rtol=limit, atol=0)
    else:
        assert np.isnan(gb).all()
