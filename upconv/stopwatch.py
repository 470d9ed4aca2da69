"""How long a call takes, and how much memory: medians of calls that take turns.

On the GPU each call is timed by CUDA events after a flush of the L2 cache. The flush also keeps
the GPU busy while the host prepares the call, so that what is timed is the work and not the launch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .contenders import Call, Contender

FEWEST_RUNS, MOST_RUNS = 7, 200
FLUSH_BYTES = 256 << 20
"""Written before every timed GPU call: five times the L2 cache of an H200."""
FLUSH_SECONDS = 5e-5
"""An H200 takes about 60 us for it; a call that takes the host longer gets more flushes."""
MOST_FLUSHES = 16


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one contender: median, quartiles, fastest, and how many calls."""

    median: float
    low: float
    high: float
    fastest: float
    runs: int

    @staticmethod
    def of(milliseconds: list[float]) -> Timing:
        low, median, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return Timing(median, low, high, min(milliseconds), len(milliseconds))


def seconds_of(call: Call) -> float:
    """By the clock of the host: on a GPU the time until the work is in its queue."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def runs_for(seconds: float, round_seconds: float, fewest: int = FEWEST_RUNS) -> int:
    return max(fewest, min(MOST_RUNS, int(seconds / max(round_seconds, 1e-6))))


def turns(names: list[str], runs: int) -> Iterator[str]:
    """Who is next: in order, then in reverse, so that no one is always first."""
    for run in range(runs):
        yield from names if run % 2 == 0 else reversed(names)


def timed(contenders: dict[str, Contender], seconds: float, device: str) -> dict[str, Timing]:
    """Everyone's times, in about so many seconds altogether."""
    found = (time_on_gpu if device == "cuda" else time_on_cpu)(contenders, seconds)
    return {name: Timing.of(milliseconds) for name, milliseconds in found.items()}


def time_on_cpu(contenders: dict[str, Contender], seconds: float) -> dict[str, list[float]]:
    calls = {name: one.call for name, one in contenders.items()}
    for call in calls.values():
        seconds_of(call)
    once = sum(seconds_of(call) for call in calls.values())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns(list(calls), runs_for(seconds, once)):
        times[name].append(seconds_of(calls[name]) * 1e3)
    return times


class GpuClock:
    """Milliseconds of one call between two events, after the flushes."""

    def __init__(self) -> None:
        self.event: Any = torch.cuda.Event  # untyped in some versions of torch
        self.flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def flushes_for(self, call: Call) -> int:
        torch.cuda.synchronize()
        host = min(seconds_of(call) for _ in range(3))
        torch.cuda.synchronize()
        return min(MOST_FLUSHES, 1 + int(host / FLUSH_SECONDS))

    def milliseconds(self, call: Call, flushes: int = 1) -> float:
        start, end = self.event(enable_timing=True), self.event(enable_timing=True)
        while True:
            for _ in range(flushes):
                self.flushed.zero_()
            start.record()
            call()
            end.record()
            overtaken = start.query()
            end.synchronize()
            # Where the GPU came to the start before the host had come to the end, waiting for the
            # host may have been timed: once more, with more flushes to hide it behind.
            if not overtaken or flushes >= MOST_FLUSHES:
                return float(start.elapsed_time(end))
            flushes = min(2 * flushes, MOST_FLUSHES)


def time_on_gpu(contenders: dict[str, Contender], seconds: float) -> dict[str, list[float]]:
    clock = GpuClock()
    for one in contenders.values():
        one.do(clock.milliseconds)
    # The same for everyone, so that nobody starts on a warmer cache or a cooler chip.
    flushes = max(one.do(clock.flushes_for) for one in contenders.values())

    def milliseconds(call: Call) -> float:
        return clock.milliseconds(call, flushes)

    once = sum(one.do(milliseconds) for one in contenders.values()) / 1e3
    around = (1.5e-4 + flushes * FLUSH_SECONDS) * len(contenders)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name in turns(list(contenders), runs_for(seconds, once + around)):
        times[name].append(contenders[name].do(milliseconds))
    return times


def scratch_bytes(call: Call) -> int:
    """What one call on the GPU allocates at its peak, beside the results that it returns."""
    # As requested: the allocator rounds up, by as much as 1 MiB where it does not split a block.
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    results = call()
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    returned = sum(result.untyped_storage().nbytes() for result in results)
    return max(0, int(peak - before - returned))
