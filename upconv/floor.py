"""The floor: the time below which no implementation can get, by this machine's own rates.

The rates are measured in the run that uses them, not taken from a data sheet: a large product of
random matrices says how much arithmetic the machine sustains in a dtype, a large copy how much
traffic. Random, because a GPU clocks higher on matrices of zeros than on real numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from .contenders import Call
from .planner import Problem
from .stopwatch import GpuClock, runs_for, seconds_of

MATRIX = {"cpu": 1536, "cuda": 8192}
"""Rows of the square matrices: 7 GFLOP, 0.05 s on two cores; 1.1 TFLOP, 2.7 ms on an H200."""
COPIED_BYTES = {"cpu": 128 << 20, "cuda": 2 << 30}
"""Many times the caches."""
SECONDS = {"cpu": 0.3, "cuda": 0.06}
"""For each rate, at most. On a GPU as short as the cases are timed: half a second of TF32 products
gave 359 TFLOP/s on an H200 where 421 had been measured before, perhaps because power slows longer
runs, and a floor must not be too high. 0.06 s gave 401 to 421 in four runs, and 786 and 805 of
bfloat16."""
FEWEST_RUNS = 5


@dataclass(frozen=True)
class Rates:
    """What the machine sustains."""

    flop_per_s: float
    byte_per_s: float

    def floor_ms(self, problem: Problem, direction: str) -> float:
        """The longer of the arithmetic and the traffic, each byte moved once.

        The gradients of input and weight are counted as two forward passes.
        """
        arithmetic = problem.flops / self.flop_per_s
        traffic = problem.bytes / self.byte_per_s
        return passes(direction) * max(arithmetic, traffic) * 1e3


def passes(direction: str) -> int:
    """How many times the work of a forward pass."""
    return 2 if direction == "backward" else 1


def tensor_dtype(name: str) -> torch.dtype:
    """The dtype of the tensors: "tf32" is a way to multiply float32."""
    dtype = getattr(torch, "float32" if name == "tf32" else name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@contextmanager
def precision(device: str, dtype: str, what: str) -> Iterator[None]:
    """Inside, the GPU multiplies float32 as the name says: "tf32" or, strictly, "float32".

    `what` is "conv" or "matmul". Each has a switch of its own; the other one stays as it is.
    """
    if device != "cuda" or dtype not in ("tf32", "float32"):
        yield
        return
    backends: Any = torch.backends
    switch = backends.cudnn.conv if what == "conv" else backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    try:
        yield
    finally:
        switch.fp32_precision = before


def measured_rates(device: str, dtype: str, seconds: float = 1.0) -> Rates:
    """Both rates, medians, in no more than so many seconds each."""
    with torch.no_grad(), precision(device, dtype, "matmul"):
        byte_per_s = copy_rate(device, seconds)
        multiplied = tensor_dtype(dtype)
        if device == "cpu" and multiplied.itemsize == 2:
            multiplied = faster_on_cpu(multiplied)
        return Rates(product_rate(device, multiplied, MATRIX[device], seconds), byte_per_s)


def faster_on_cpu(dtype: torch.dtype) -> torch.dtype:
    """A CPU without 16-bit arithmetic is faster when it converts to float32 first."""
    return max((torch.float32, dtype), key=lambda tried: product_rate("cpu", tried, 256, 0.0))


def product_rate(device: str, dtype: torch.dtype, rows: int, seconds: float) -> float:
    a, b = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return 2 * rows**3 / median_seconds(lambda: (torch.mm(a, b, out=product),), device, seconds)


def copy_rate(device: str, seconds: float) -> float:
    """Bytes read and bytes written, both counted."""
    source = torch.zeros(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: (target.copy_(source),), device, seconds)


def median_seconds(call: Call, device: str, seconds: float) -> float:
    clock = GpuClock() if device == "cuda" else None

    def once() -> float:
        return seconds_of(call) if clock is None else clock.milliseconds(call) / 1e3

    once()
    runs = runs_for(min(seconds, SECONDS[device]), once(), FEWEST_RUNS)
    return median(once() for _ in range(runs))
