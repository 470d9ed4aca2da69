"""What a tiny call costs on the host: PyTorch's function and layer against ours.

    python benchmarks/host_cost.py [--rounds N]

The problem, (1, 4, 4, 4) by a 4 -> 4, 3x3 kernel on one thread, takes next to no computing time:
what is left is the cost of the call itself. All variants take turns in every round, so that a busy
machine slows all of them; medians over the rounds are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import upconv
from upconv import ops

CALLS = 400


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def variants(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    theirs = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1)
    ours = upconv.ConvTranspose2d(4, 4, 3, stride=2, padding=1)
    w, b = theirs.weight, theirs.bias
    plain = (x, w.detach(), None)
    full = (x, w, b, (2, 2), (1, 1), (0, 0), 1, (1, 1))
    return {
        "F.conv_transpose2d(x, w)": lambda: F.conv_transpose2d(*plain),
        "upconv.conv_transpose2d(x, w)": lambda: upconv.conv_transpose2d(*plain),
        "F.conv_transpose2d, all arguments": lambda: F.conv_transpose2d(*full),
        "upconv.conv_transpose2d, all arguments": lambda: upconv.conv_transpose2d(*full),
        "nn.ConvTranspose2d": lambda: theirs(x),
        "upconv.ConvTranspose2d": lambda: ours(x),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    x = torch.randn(1, 4, 4, 4)
    print(f"{'median microseconds of a call':40}{'planner':>10}{'cpu_fprop':>11}{'aten':>8}")
    for title, recording in (("no gradients", False), ("recording gradients", True)):
        columns = []
        for kernel in (None, "cpu_fprop", "aten"):
            with torch.set_grad_enabled(recording), ops.forced(kernel):
                calls = variants(x)
                times: dict[str, list[float]] = {name: [] for name in calls}
                for _ in range(rounds):
                    for name, call in calls.items():
                        times[name].append(microseconds(call))
                columns.append({name: statistics.median(t[2:]) for name, t in times.items()})
        print(title)
        for name in columns[0]:
            print(f"  {name:38}" + "".join(f"{column[name]:10.2f}" for column in columns))


if __name__ == "__main__":
    main()
