"""A small sweep of the GPU kernels for compute-sanitizer:

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

# batch, in, out, size, kernel, stride, padding, output padding, groups, dilation, dtype
DIRECT_SWEEP = [
    (2, 5, 5, (20, 41), 16, 8, 4, 0, 5, 1, torch.float32),
    (2, 5, 5, (20, 41), 16, 8, 4, 0, 5, 1, torch.bfloat16),
    (2, 12, 24, (33, 30), 4, 2, 1, 0, 12, 1, torch.float16),
    (3, 56, 1, (30, 50), 9, 3, 4, 2, 1, 1, torch.float32),
    (2, 32, 64, (12, 33), (3, 5), (2, 3), (1, 2), 0, 4, (2, 1), torch.float32),
    (2, 8, 8, (40, 56), 3, 1, 1, 0, 8, 1, torch.float64),
    (1, 16, 16, (5, 9, 17), (3, 5, 7), 2, (1, 2, 3), 1, 4, 1, torch.bfloat16),
    (2, 3, 3, (1500,), 4, 2, 1, 0, 3, 1, torch.float32),
]


def direct_sweep() -> None:
    operators = (upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)
    for batch, cin, cout, size, kernel, s, p, op, groups, d, dtype in DIRECT_SWEEP:
        each = (kernel,) * len(size) if isinstance(kernel, int) else kernel
        x = torch.randn(batch, cin, *size, device="cuda").to(dtype)
        w = torch.randn(cin, cout // groups, *each, device="cuda").to(dtype)
        with torch.no_grad(), ops.forced("direct_fprop"):
            y = operators[len(size) - 1](x, w, None, s, p, op, groups, d)
        torch.cuda.synchronize()
        assert bool(torch.isfinite(y).all())
        print("clean, direct", batch, cin, cout, size, kernel, s, dtype)


def main() -> None:
    direct_sweep()
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
