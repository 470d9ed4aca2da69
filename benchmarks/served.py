"""Is what the planner serves faster than PyTorch? Times it on the calls that PyTorch was timed on.

    python benchmarks/served.py OUT.jsonl [SECONDS]

The calls of `benchmarks/fit_aten.py`, forward and the input's gradient, contiguous, in an order
drawn once, until the time is over. A line for each call: the problem, the kernel that served it,
its microseconds, and PyTorch's as they were measured then, with the faster of its settings. Prints
how many times as fast ours are, PyTorch's own counting as 1, and every call in which ours lose.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from math import exp, log
from statistics import mean, median
from typing import Any

import torch
from fit_aten import MEASURED, read
from measure_sm90 import calls

from upconv import plans
from upconv.planner import Problem, cuda_aten, make_plan
from upconv.stopwatch import GpuClock

LOST = 1.05


def measured(problem: Problem, clock: GpuClock) -> float:
    """Microseconds of our own operator."""
    precision = "tf32" if problem.tf32 else "ieee"
    torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
    ours, _ = calls(problem)
    ours()
    return 1e3 * median(clock.milliseconds(lambda: (ours(),)) for _ in range(3))


def report(rows: list[dict[str, Any]]) -> None:
    gains = defaultdict(list)
    for row in rows:
        gains[row["call"]].append(log(row["aten"] / row["us"]))
        if row["us"] > LOST * row["aten"]:
            print(f"{row['us'] / row['aten']:.2f} {row['kernel']} {row['problem']}")
    for call, each in sorted(gains.items()):
        print(f"{call:24} {len(each):4} calls, {exp(mean(each)):.2f} times as fast")


def main(path: str, seconds: float) -> None:
    hardware, clock, rows = plans.cuda_hardware(0), GpuClock(), []
    wanted = [call for call in read(MEASURED) if not call.problem.channels_last]
    wanted = [call for call in wanted if call.problem.direction != "grad_weight"]
    end = time.monotonic() + seconds
    with open(path, "w") as file, torch.no_grad():
        for call in random.Random(0).sample(wanted, len(wanted)):
            if time.monotonic() > end:
                break
            problem, aten = call.problem, call.microseconds
            kernel = make_plan(problem, hardware).kernel
            us = aten if kernel == "aten" else measured(problem, clock)
            row = {"call": cuda_aten.call_of(problem), "kernel": kernel, "us": us, "aten": aten}
            rows.append({**row, "problem": asdict(problem)})
            file.write(json.dumps(rows[-1]) + "\n")
    report(rows)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 300.0)
