"""Swaps the transposed convolutions of two real networks, checks the results, times both.

    python examples/demo.py [--batch 8] [--seconds 3]

The networks are a DCGAN generator, which is transposed convolutions and little else, and the
decoder of a U-Net, where they are a small part beside ordinary convolutions.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from itertools import pairwise

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import upconv


class Generator(nn.Sequential):
    """DCGAN: noise of 100 numbers to a 64x64 picture."""

    def __init__(self, width: int = 64) -> None:
        channels = [100, 8 * width, 4 * width, 2 * width, width]
        layers: list[nn.Module] = []
        for index, (cin, cout) in enumerate(pairwise(channels)):
            stride, padding = (1, 0) if index == 0 else (2, 1)
            layers += [
                nn.ConvTranspose2d(cin, cout, 4, stride, padding, bias=False),
                nn.BatchNorm2d(cout),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


class Decoder(nn.Module):
    """The way up of a U-Net: double the picture, halve the channels, join the skip, convolve."""

    def __init__(self, width: int = 32, steps: int = 3) -> None:
        super().__init__()
        channels = [width << step for step in range(steps, -1, -1)]
        pairs = list(pairwise(channels))
        self.up = nn.ModuleList(nn.ConvTranspose2d(cin, cout, 2, 2) for cin, cout in pairs)
        self.join = nn.ModuleList(nn.Conv2d(2 * cout, cout, 3, padding=1) for _, cout in pairs)

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor:
        for up, join, skip in zip(self.up, self.join, skips, strict=True):
            x = torch.relu(join(torch.cat([up(x), skip], 1)))
        return x


def networks(batch: int) -> dict[str, tuple[nn.Module, list[Tensor]]]:
    skips = [torch.randn(batch, 32 << step, 128 >> step, 128 >> step) for step in (2, 1, 0)]
    return {
        "DCGAN generator": (Generator(), [torch.randn(batch, 100, 1, 1)]),
        "U-Net decoder": (Decoder(), [torch.randn(batch, 256, 16, 16), *skips]),
    }


def milliseconds(models: list[nn.Module], inputs: list[Tensor], seconds: float) -> list[float]:
    """Median time of each model; they take turns, so that both see the same machine."""
    times: list[list[float]] = [[] for _ in models]
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < end:
        for model, record in zip(models, times, strict=True):
            start = time.perf_counter()
            model(*inputs)
            record.append((time.perf_counter() - start) * 1e3)
    return [sorted(record)[len(record) // 2] for record in times]


def main() -> int:
    parser = argparse.ArgumentParser(description="upconv against PyTorch on two networks")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="time to measure each network")
    options = parser.parse_args()
    torch.manual_seed(0)
    table = Table(title=f"forward on the CPU, {torch.get_num_threads()} threads, float32")
    for column in ("network", "swapped", "difference", "PyTorch ms", "upconv ms", "speed-up"):
        table.add_column(column, justify="left" if column == "network" else "right")
    wrong = False
    for name, (network, inputs) in networks(options.batch).items():
        network.eval()
        original = copy.deepcopy(network)
        report = upconv.accelerate(network)
        print(f"{name}\n{report}\n")
        with torch.no_grad():
            expected, result = original(*inputs), network(*inputs)
            difference = float((result - expected).abs().max() / expected.abs().max())
            wrong |= not difference < 1e-4
            before, after = milliseconds([original, network], inputs, options.seconds)
        swapped = sum(isinstance(layer, upconv.ConvTranspose2d) for layer in network.modules())
        numbers = (f"{difference:.1e}", f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}x")
        table.add_row(name, f"{swapped} layers", *numbers)
    Console().print(table)
    print("WRONG: the networks differ" if wrong else "upconv and PyTorch agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
