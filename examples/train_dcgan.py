"""Trains a DCGAN generator twice, with PyTorch's layers and with upconv's, and compares the runs.

    python examples/train_dcgan.py [--steps 300] [--batch 64] [--width 64] [--device cuda] [--amp]

The data are made here: pictures of a few soft blobs, and the numbers that describe them, which the
generator learns to turn into the picture. Both runs start from the same weights and see the same
data in the same order, so that their loss curves must agree but for rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise

import torch
from torch import Tensor, nn

import upconv

BLOBS, NUMBERS = 4, 6
"""Blobs of a picture; numbers of a blob: place, size and colour."""


class Generator(nn.Sequential):
    """The numbers of a picture to 64x64 pixels in colour."""

    def __init__(self, width: int) -> None:
        channels = [BLOBS * NUMBERS, 8 * width, 4 * width, 2 * width, width]
        layers: list[nn.Module] = []
        for index, (cin, cout) in enumerate(pairwise(channels)):
            stride, padding = (1, 0) if index == 0 else (2, 1)
            layers += [
                nn.ConvTranspose2d(cin, cout, 4, stride, padding, bias=False),
                nn.BatchNorm2d(cout),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())


def pictures(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers (count, BLOBS * NUMBERS, 1, 1), and the pictures (count, 3, 64, 64) they describe."""
    numbers = torch.rand(count, BLOBS, NUMBERS, device=device) * 2 - 1
    axis = torch.linspace(-1, 1, 64, device=device)
    y, x, size, colour = numbers[..., 0], numbers[..., 1], numbers[..., 2], numbers[..., 3:]
    radius = (0.3 + 0.15 * size)[..., None]
    rows = torch.exp(-(((axis - y[..., None]) / radius) ** 2))
    columns = torch.exp(-(((axis - x[..., None]) / radius) ** 2))
    picture = torch.einsum("nbc,nby,nbx->ncyx", colour, rows, columns)
    return numbers.reshape(count, -1, 1, 1), picture.tanh()


def train(model: nn.Module, options: argparse.Namespace) -> tuple[list[float], float]:
    """The loss of every step, and the seconds of all but the first tenth (builds, caches)."""
    device = torch.device(options.device)
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=options.amp)
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step in range(options.steps):
        if step == options.steps // 10:
            synchronize(device)
            start = time.perf_counter()
        numbers, expected = pictures(options.batch, device)
        with torch.autocast(device.type, torch.float16, enabled=options.amp):
            loss = nn.functional.mse_loss(model(numbers).float(), expected)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    synchronize(device)
    return [float(loss) for loss in losses], time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def smooth(losses: list[float]) -> list[float]:
    """Means over a tenth of the run: single steps scatter with their pictures."""
    window = max(1, len(losses) // 10)
    return [sum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description="the same training with and without upconv")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=64, help="channels of the last hidden layer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--amp", action="store_true", help="float16 with a GradScaler")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Generator(options.width).to(options.device)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    theirs, their_seconds = train(model, options)
    model.load_state_dict(start)
    print(upconv.accelerate(model))
    ours, our_seconds = train(model, options)
    print(f"\n{'step':>6} {'PyTorch':>10} {'upconv':>10}   loss")
    for step in sorted(
        {0, *range(0, options.steps, max(1, options.steps // 8)), options.steps - 1}
    ):
        print(f"{step:6} {theirs[step]:10.5f} {ours[step]:10.5f}")
    pairs = list(zip(smooth(theirs), smooth(ours), strict=True))
    apart = max(abs(a - b) / a for a, b in pairs)
    print(f"\nsmoothed curves differ by at most {100 * apart:.2f} %")
    speed = their_seconds / our_seconds
    print(f"PyTorch {their_seconds:.2f} s, upconv {our_seconds:.2f} s: {speed:.2f} times as fast")
    if not apart < 0.05:
        print("the loss curves differ by more than noise", file=sys.stderr)
        return 1
    print("the loss curves agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
