"""A small sweep of the Hopper kernel for compute-sanitizer:

compute-sanitizer --tool memcheck  python tools/sanitize.py
compute-sanitizer --tool racecheck python tools/sanitize.py
"""

from __future__ import annotations

import torch

import upconv
from upconv import ops

# batch, in, out, size, kernel, stride, padding, output padding, dilation, channels_last, dtype
SWEEP = [
    (2, 64, 64, (20, 41), (3, 3), 1, 0, 0, 1, False, torch.float32),
    (2, 64, 128, (16, 64), (3, 5), 1, 0, 0, 1, False, torch.bfloat16),
    (3, 40, 48, (9, 9), (4, 4), 2, 1, 0, 1, False, torch.float32),
    (2, 32, 32, (30, 50), (3, 7), 1, (1, 3), 0, 1, False, torch.float16),
    (2, 16, 24, (11, 13), (3, 3), 5, 1, 2, 2, False, torch.bfloat16),
    (2, 64, 64, (14, 14), (2, 2), 2, 0, 0, 1, True, torch.bfloat16),
    (1, 24, 72, (7, 33), (2, 3), (3, 1), 0, 0, (1, 2), True, torch.float32),
]


def main() -> None:
    for batch, cin, cout, size, kernel, s, p, op, d, last, dtype in SWEEP:
        x = torch.randn(batch, cin, *size, device="cuda").to(dtype)
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        w = torch.randn(cin, cout, *kernel, device="cuda").to(dtype)
        with torch.no_grad(), ops.forced("sm90_wgmma_fprop"):
            y = upconv.conv_transpose2d(x, w, None, s, p, op, 1, d)
        torch.cuda.synchronize()
        assert bool(torch.isfinite(y).all())
        print("clean", batch, cin, cout, size, kernel, s, dtype)


if __name__ == "__main__":
    main()
