"""A small sweep of the GPU kernels for compute-sanitizer:

compute-sanitizer --tool memcheck  python -m tools.sanitize
compute-sanitizer --tool racecheck python -m tools.sanitize [SWEEP ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

import upconv
from upconv import ops, plans
from upconv.planner import (
    Problem,
    depthwise_igrad,
    depthwise_wgrad,
    direct,
    direct_igrad,
    direct_wgrad,
    gather_igrad,
    gather_wgrad,
    mma,
    mma_tiling,
    overlap,
    sm90,
    sm90_patch,
    sm90_patch_wgrad,
    sm90_phases,
    sm90_phases_wgrad,
    sm90_walk,
    sm90_wgrad,
)

# batch, in, out, size, kernel, stride, padding, output padding, dilation, channels_last, dtype
SWEEP = [
    (2, 64, 64, (20, 41), (3, 3), 1, 0, 0, 1, False, torch.float32),
    (2, 64, 128, (16, 64), (3, 5), 1, 0, 0, 1, False, torch.bfloat16),
    (3, 40, 48, (9, 9), (4, 4), 2, 1, 0, 1, False, torch.float32),
    (2, 32, 32, (30, 50), (3, 7), 1, (1, 3), 0, 1, False, torch.float16),
    (2, 16, 24, (11, 13), (3, 3), 5, 1, 2, 2, False, torch.bfloat16),
    (3, 16, 24, (14, 14), (2, 2), 2, 0, 0, 1, False, torch.bfloat16),
    (2, 24, 40, (11, 34), (3, 3), 1, 1, 0, 1, False, torch.bfloat16),
    (2, 64, 64, (14, 14), (2, 2), 2, 0, 0, 1, True, torch.bfloat16),
    (1, 24, 72, (7, 33), (2, 3), (3, 1), 0, 0, (1, 2), True, torch.float32),
]

# batch, in, out, size, kernel, stride, padding, output padding, dtype
PHASES_SWEEP = [
    (3, 40, 24, (8, 8), 4, 2, 1, 0, torch.float32),
    (2, 72, 136, (9, 24), 4, 2, 1, 0, torch.bfloat16),
    (2, 24, 40, (7, 48), 3, 2, 1, 1, torch.float16),
    (1, 24, 70, (5, 12), 3, 2, 1, 0, torch.float32),
    (2, 16, 24, (3, 4, 16), 4, 2, 1, 0, torch.bfloat16),
    (2, 64, 24, (264,), 4, 2, 1, 0, torch.float32),
]

# batch, in, out, size, kernel, stride and dilation, padding, dtype
WALK_SWEEP = [
    (2, 40, 72, (20, 40), 3, 1, 1, torch.float32),
    (1, 64, 24, (9, 264), (5, 3), 1, 0, torch.bfloat16),
    (2, 24, 48, (5, 6, 16), 3, 1, 1, torch.float16),
    (1, 16, 16, (3, 9, 24), 3, 2, 1, torch.float32),
    (2, 72, 140, (264,), 3, 2, 1, torch.bfloat16),
]

# batch, in, out, size, kernel and stride, dtype
PATCH_SWEEP = [
    (3, 40, 48, (14, 14), 2, torch.float32),
    (3, 140, 72, (14, 14), 2, torch.bfloat16),
    (2, 520, 24, (8, 32), 2, torch.float32),
    (2, 64, 72, (8, 32), 2, torch.bfloat16),
    (2, 24, 16, (3, 5, 16), 2, torch.float32),
    (2, 24, 16, (4, 28), 2, torch.float16),
    (9, 40, 48, (14, 14), 2, torch.bfloat16),
    (2, 24, 16, (6, 10), 4, torch.float32),
    (2, 24, 16, (8, 32), 4, torch.float16),
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

# batch, in, out, size, kernel, stride, padding, groups, dilation, dtype
GRADIENT_SWEEP = [
    (2, 32, 48, (18, 37), 3, 1, 1, 1, 1, torch.float32),
    (2, 64, 32, (12, 30), (3, 5), 1, 0, 1, 1, torch.bfloat16),
    (2, 40, 24, (9, 14), 4, 2, 1, 1, 1, torch.float32),
    (2, 32, 32, (9, 14), 2, 2, 0, 1, 1, torch.float16),
    (1, 32, 64, (301,), 3, 2, 1, 1, 2, torch.bfloat16),
    (1, 24, 16, (5, 9, 17), 3, 1, 1, 1, 1, torch.float32),
    (2, 32, 32, (10, 20), 3, 2, 1, 2, 1, torch.float32),
    (2, 64, 64, (20, 64), 3, 1, 0, 1, 1, torch.bfloat16),
    (9, 64, 64, (8, 8), 4, 2, 1, 1, 1, torch.float32),
    (3, 64, 64, (9, 32), 2, 2, 0, 1, 1, torch.bfloat16),
    (2, 32, 32, (9, 40), 3, 1, 0, 1, 1, torch.bfloat16),
    (2, 32, 32, (7, 21), 4, 1, 1, 1, 1, torch.bfloat16),
    (1, 16, 32, (4, 7, 20), 3, 1, 0, 1, 1, torch.bfloat16),
    (2, 32, 64, (9, 20), 5, 3, 1, 2, 1, torch.float32),
]

# batch, channels, size, kernel, stride, padding, dtype
DEPTHWISE_SWEEP = [
    (2, 5, (20, 41), 16, 8, 4, torch.float32),
    (3, 40, (7, 7), 4, 2, 1, torch.bfloat16),
    (2, 12, (13, 30), 3, 2, 1, torch.float16),
    (9, 3, (1500,), 4, 2, 1, torch.float32),
    (2, 4, (4, 9, 17), 4, 2, 1, torch.bfloat16),
    (2, 7, (9, 15), 2, 2, 0, torch.float32),
]

# batch, in, out, size, kernel, stride, padding, output padding, groups, dtype
OVERLAP_SWEEP = [
    (2, 13, 1, (20, 40), 9, 3, 4, 2, 1, torch.float32),
    (3, 18, 3, (6, 16), 4, 2, 1, 0, 1, torch.bfloat16),
    (2, 20, 1, (333,), 7, 1, 3, 0, 1, torch.float16),
    (2, 9, 2, (5, 72), 3, 2, 1, 1, 1, torch.float32),
    (1, 8, 1, (3, 4, 24), (2, 3, 5), (2, 1, 2), 0, 0, 1, torch.bfloat16),
    (2, 20, 4, (5, 17), 5, 2, 2, 1, 4, torch.bfloat16),
]

# batch, in, out, size, kernel, stride, padding, groups, dilation, dtype
MMA_SWEEP = [
    (2, 24, 20, (9, 21), 3, 1, 1, 1, 1, torch.float32),
    (2, 32, 64, (12, 33), (3, 5), (2, 3), (1, 2), 4, (2, 1), torch.bfloat16),
    (1, 16, 16, (5, 9, 17), (3, 5, 7), 2, (1, 2, 3), 2, 1, torch.float32),
    (2, 20, 12, (300,), 4, 2, 1, 1, 1, torch.float16),
    (2, 16, 24, (11, 13), 3, 5, 1, 1, 2, torch.bfloat16),
]

# size of grad_output, channels_last, dtype
BIAS_SWEEP = [
    ((2, 5, 33, 41), False, torch.float32),
    ((4, 40, 130, 258), False, torch.bfloat16),
    ((40, 16, 7, 7), False, torch.float16),
    ((2, 24, 33, 400), True, torch.bfloat16),
    ((2, 7, 30, 50), True, torch.float32),
]


def layer(batch, cin, cout, size, kernel, groups, dtype):  # type: ignore[no-untyped-def]
    """The operator for so many dimensions, an input and a weight."""
    operators = (upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)
    each = (kernel,) * len(size) if isinstance(kernel, int) else kernel
    x = torch.randn(batch, cin, *size, device="cuda").to(dtype)
    w = torch.randn(cin, cout // groups, *each, device="cuda").to(dtype)
    return operators[len(size) - 1], x, w


def gradient_sweep() -> None:
    for batch, cin, cout, size, kernel, s, p, groups, d, dtype in GRADIENT_SWEEP:
        operator, x, w = layer(batch, cin, cout, size, kernel, groups, dtype)
        y = operator(x, w, None, s, p, 0, groups, d)
        each = [(v,) * len(size) for v in (s, p, 0, d)]
        rest = (*each[:3], groups, each[3])
        for name, kernel_name, other, of in (
            ("grad_input", sm90.KERNEL, w, x),
            ("grad_weight", sm90_wgrad.KERNEL, x, w),
        ):
            with torch.no_grad(), ops.forced(kernel_name):
                gradient = ops.GRADIENTS[name](y, other, of.shape, *rest)
            torch.cuda.synchronize()
            assert bool(torch.isfinite(gradient).all())
        print("clean, gradients", batch, cin, cout, size, kernel, s, dtype)


def patch_calls(operator, x, w):  # type: ignore[no-untyped-def]
    """A layer whose kernel is its stride, its input's gradient, and its parameters as lists."""
    step = tuple(w.shape[2:])
    none, ones = ((v,) * len(step) for v in (0, 1))
    rest = (step, none, none, 1, ones)
    with torch.no_grad(), ops.forced(sm90_patch.KERNEL):
        y = operator(x, w, None, step)
        return y, ops.GRADIENTS["grad_input"](y, w, x.shape, *rest), rest


def patch_sweep() -> None:
    for batch, cin, cout, size, kernel, dtype in PATCH_SWEEP:
        operator, x, w = layer(batch, cin, cout, size, kernel, 1, dtype)
        if len(size) == 2:
            with torch.no_grad(), ops.forced(sm90_patch.KERNEL):
                operator(x.contiguous(memory_format=torch.channels_last), w, None, kernel)
        y, gx, rest = patch_calls(operator, x, w)
        for name in (sm90_patch_wgrad.KERNEL, sm90_phases_wgrad.KERNEL):
            with torch.no_grad(), ops.forced(name):
                gw, gb = torch.ops.upconv._grad_weight_and_bias(y, x, w.shape, *rest)
            torch.cuda.synchronize()
            assert all(bool(torch.isfinite(each).all()) for each in (y, gx, gw, gb))
        print("clean, patches", batch, cin, cout, size, kernel, dtype)


def strict_patch_sweep() -> None:
    for batch, cin, cout, size, kernel, dtype in PATCH_SWEEP:
        if dtype != torch.float32:
            continue
        operator, x, w = layer(batch, cin, cout, size, kernel, 1, dtype)
        y, gx, _ = patch_calls(operator, x, w)
        torch.cuda.synchronize()
        assert all(bool(torch.isfinite(each).all()) for each in (y, gx))
        print("clean, patches, strict", batch, cin, cout, size, kernel)


def phases_sweep() -> None:
    for batch, cin, cout, size, kernel, *steps, dtype in PHASES_SWEEP:
        operator, x, w = layer(batch, cin, cout, size, kernel, 1, dtype)
        lists = [(v,) * len(size) for v in (*steps, 1)]
        with torch.no_grad(), ops.forced(sm90_phases.KERNEL):
            y = operator(x, w, None, *steps)
            gx = ops.GRADIENTS["grad_input"](y, w, x.shape, *lists[:3], 1, lists[3])
        with torch.no_grad(), ops.forced(sm90_phases_wgrad.KERNEL):
            rest = (w.shape, *lists[:3], 1, lists[3])
            gw, gb = torch.ops.upconv._grad_weight_and_bias(y, x, *rest)
        torch.cuda.synchronize()
        assert all(bool(torch.isfinite(each).all()) for each in (y, gx, gw, gb))
        print("clean, phases", batch, cin, cout, size, kernel, *steps, dtype)


def walk_sweep() -> None:
    for batch, cin, cout, size, kernel, step, padding, dtype in WALK_SWEEP:
        operator, x, w = layer(batch, cin, cout, size, kernel, 1, dtype)
        with torch.no_grad(), ops.forced(sm90_walk.KERNEL):
            y = operator(x, w, None, step, padding, step - 1, 1, step)
            zeros, ones = ((v,) * len(size) for v in (0, 1))
            same = tuple((k - 1) // 2 for k in w.shape[2:])
            gx = ops.GRADIENTS["grad_input"](
                x.new_ones(batch, cout, *size), w, x.shape, ones, same, zeros, 1, ones
            )
        torch.cuda.synchronize()
        assert all(bool(torch.isfinite(each).all()) for each in (y, gx))
        print("clean, walks", batch, cin, cout, size, kernel, step, dtype)


def mma_sweep() -> None:
    """Five tilings of each form for each layer in each direction; the gradient is on trial."""
    for batch, cin, cout, size, kernel, s, p, groups, d, dtype in MMA_SWEEP:
        operator, x, w = layer(batch, cin, cout, size, kernel, groups, dtype)
        sizes = (batch, cin, cout, size, kernel, s, p, 0, d, groups)
        tf32 = torch.backends.cudnn.conv.fp32_precision == "tf32"
        problem = Problem.of(*sizes, dtype=str(dtype)[6:], tf32=tf32)
        back = replace(problem, direction="grad_input")
        rest = (problem.stride, problem.padding, problem.output_padding, groups, problem.dilation)
        for record in some_mma_plans(problem):
            with plans.given(mma.KERNEL, record), torch.no_grad():
                y = operator(x, w, None, s, p, 0, groups, d)
            torch.cuda.synchronize()
            assert bool(torch.isfinite(y).all())
        for record in some_mma_plans(back):
            with plans.given(mma.KERNEL, record), torch.no_grad():
                gx = ops.GRADIENTS["grad_input"](y, w, x.shape, *rest)
            torch.cuda.synchronize()
            assert bool(torch.isfinite(gx).all())
        print("clean, mma.sync", batch, cin, cout, size, kernel, s, dtype)


def some_mma_plans(problem: Problem) -> Iterator[tuple[int, ...]]:
    hardware = plans.cuda_hardware(0)
    every = list(mma_tiling.tilings(mma.works(problem), hardware))
    for pixels in mma_tiling.WARP_PIXELS:
        these = [t for t in every if t.warp_pixels == pixels and mma_tiling.fits(t, hardware)]
        for tiling in these[:: max(len(these) // 5, 1)]:
            yield mma.record(tiling.work, tiling)


def bias_sweep() -> None:
    for size, last, dtype in BIAS_SWEEP:
        gy = torch.randn(size, device="cuda").to(dtype)
        if last:
            gy = gy.contiguous(memory_format=torch.channels_last)
        result = torch.ops.upconv._grad_bias(gy, 2)
        torch.cuda.synchronize()
        assert bool(torch.isfinite(result).all())
        print("clean, bias", size, last, dtype)


def direct_sweep() -> None:
    for batch, cin, cout, size, kernel, s, p, op, groups, d, dtype in DIRECT_SWEEP:
        operator, x, w = layer(batch, cin, cout, size, kernel, groups, dtype)
        with torch.no_grad(), ops.forced(direct.KERNEL):
            y = operator(x, w, None, s, p, op, groups, d)
        torch.cuda.synchronize()
        assert bool(torch.isfinite(y).all())
        print("clean, direct", batch, cin, cout, size, kernel, s, dtype)


def direct_gradient_sweep() -> None:
    for batch, cin, cout, size, kernel, s, p, op, groups, d, dtype in DIRECT_SWEEP:
        operator, x, w = layer(batch, cin, cout, size, kernel, groups, dtype)
        y = operator(x, w, None, s, p, op, groups, d)
        each = [v if isinstance(v, tuple) else (v,) * len(size) for v in (s, p, op, d)]
        rest = (*each[:3], groups, each[3])
        for name, kernel_name, other, of in (
            ("grad_input", direct_igrad.KERNEL, w, x),
            ("grad_weight", direct_wgrad.KERNEL, x, w),
            ("grad_input", gather_igrad.KERNEL, w, x),
            ("grad_weight", gather_wgrad.KERNEL, x, w),
        ):
            with torch.no_grad(), ops.forced(kernel_name):
                gradient = ops.GRADIENTS[name](y, other, of.shape, *rest)
            torch.cuda.synchronize()
            assert bool(torch.isfinite(gradient).all())
        print("clean, gradients of few channels", batch, cin, cout, size, kernel, s, dtype)


def overlap_sweep() -> None:
    for batch, cin, cout, size, kernel, s, p, op, groups, dtype in OVERLAP_SWEEP:
        operator, x, w = layer(batch, cin, cout, size, kernel, groups, dtype)
        with torch.no_grad(), ops.forced(overlap.KERNEL):
            y = operator(x, w, None, s, p, op, groups)
        torch.cuda.synchronize()
        assert bool(torch.isfinite(y).all())
        print("clean, few output channels", batch, cin, cout, size, kernel, s, dtype)


def depthwise_sweep() -> None:
    for batch, channels, size, kernel, s, p, dtype in DEPTHWISE_SWEEP:
        operator, x, w = layer(batch, channels, channels, size, kernel, channels, dtype)
        y = operator(x, w, None, s, p, 0, channels)
        each = [(v,) * len(size) for v in (s, p, 0, 1)]
        rest = (*each[:3], channels, each[3])
        with torch.no_grad(), ops.forced(depthwise_igrad.KERNEL):
            gx = ops.GRADIENTS["grad_input"](y, w, x.shape, *rest)
        with torch.no_grad(), ops.forced(depthwise_wgrad.KERNEL):
            gw, gb = torch.ops.upconv._grad_weight_and_bias(y, x, w.shape, *rest)
        torch.cuda.synchronize()
        assert all(bool(torch.isfinite(each).all()) for each in (gx, gw, gb))
        print("clean, gradients of depthwise layers", batch, channels, size, kernel, s, dtype)


def forward_sweep() -> None:
    for batch, cin, cout, size, kernel, s, p, op, d, last, dtype in SWEEP:
        _, x, w = layer(batch, cin, cout, size, kernel, 1, dtype)
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), ops.forced(sm90.KERNEL):
            y = upconv.conv_transpose2d(x, w, None, s, p, op, 1, d)
        torch.cuda.synchronize()
        assert bool(torch.isfinite(y).all())
        print("clean", batch, cin, cout, size, kernel, s, dtype)


TF32, BOTH = ("tf32",), ("tf32", "ieee")
SWEEPS = {
    "forward": (forward_sweep, BOTH),
    "gradients": (gradient_sweep, TF32),
    "direct": (direct_sweep, TF32),
    "few-channels": (direct_gradient_sweep, BOTH),
    "few-outputs": (overlap_sweep, BOTH),
    "mma": (mma_sweep, BOTH),
    "patches": (patch_sweep, TF32),
    "strict-patches": (strict_patch_sweep, ("ieee",)),
    "phases": (phases_sweep, TF32),
    "walks": (walk_sweep, TF32),
    "depthwise": (depthwise_sweep, TF32),
    "bias": (bias_sweep, TF32),
}
"""By name, with the precisions of float32 under which each runs."""


def main(names: Sequence[str]) -> None:
    for name in names or SWEEPS:
        if name not in SWEEPS:
            sys.exit(f"{name} is no sweep; there are {', '.join(SWEEPS)}")
        sweep, precisions = SWEEPS[name]
        for precision in precisions:
            torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
            sweep()


if __name__ == "__main__":
    main(sys.argv[1:])
