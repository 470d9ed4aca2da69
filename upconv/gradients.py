"""Gradients in the benchmark: the call that computes them, and what they are in float64.

The reference is made of matrix products, one for each tap, straight from the definition

    gx[i] = sum over k of w[k] * gy[i * stride - padding + k * dilation]
    gw[k] = sum over i of x[i] * gy[i * stride - padding + k * dilation]

and shares no code with any convolution. It takes a few samples at a time, so that it fits beside
large tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import accuracy
from .accuracy import Inputs, Operator
from .contenders import Call
from .planner import ATEN, Problem

NAMES = ("input", "weight", "bias")
"""Of what the gradients are, in the order in which they are returned."""

CHUNK_BYTES = 1 << 30
"""Float64 copies of the samples taken at a time: a sample of a 1024x1024 image has 0.5 GB."""

OWN, MIXED = "upconv", "upconv + aten"
"""Kernels of a backward pass that PyTorch has no part in, or a part."""


def make_grad_output(problem: Problem, device: str = "cpu", seed: int = 1) -> Tensor:
    """Normal numbers in the layout of the output."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (problem.batch, problem.out_channels, *problem.out_size)
    gradient = torch.randn(shape, generator=generator, device=device)
    gradient = gradient.to(getattr(torch, problem.dtype))
    if problem.channels_last:
        layout = torch.channels_last if problem.ndim == 2 else torch.channels_last_3d
        gradient = gradient.to(memory_format=layout)
    return gradient


def backward_call(inputs: Inputs, operator: Operator, grad_output: Tensor) -> Call:
    """All gradients of one forward pass, which is made here and not timed."""
    operands = [
        None if tensor is None else tensor.detach().requires_grad_()
        for tensor in (inputs.x, inputs.weight, inputs.bias)
    ]
    wanted = [tensor for tensor in operands if tensor is not None]
    with torch.enable_grad():
        output = operator(*operands, *inputs.options)

    def call() -> tuple[Tensor, ...]:
        # In the caller's thread: cuDNN's choices are kept per thread, and one that is shared
        # would let whoever comes first choose for everybody.
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(output, wanted, grad_output, retain_graph=True)

    return call


def kernels_seen(call: Call) -> str:
    """Who computes the gradients: OWN, ATEN or MIXED, by what PyTorch's profiler sees one call do.

    Seen and not asked of the planner: a fallback at run time shows as well.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with silenced(), torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
    ours = [event for event in profile.events() or () if event.name.startswith("upconv::")]
    handed_on = [any(map(_is_convolution, _all_below(event))) for event in ours]
    if all(handed_on):  # also where no operator of ours was called
        return ATEN
    return MIXED if any(handed_on) else OWN


@contextmanager
def silenced() -> Iterator[None]:
    """PyTorch's profiler announces itself on stderr, past Python: in the midst of a table."""
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


def _is_convolution(event: Any) -> bool:
    return str(event.name).startswith(("aten::convolution", "aten::conv_"))


def _all_below(event: Any) -> Iterator[Any]:
    for child in event.cpu_children:
        yield child
        yield from _all_below(child)


def limits(problem: Problem) -> dict[str, float]:
    """The error that rounding explains, for each gradient by how many products it adds up.

    In TF32 the sum adds to what the products lose, which `accuracy.limit` leaves out for the few
    products of an output: over the 8.4 million of kb57's weight PyTorch is 1.9e-3 off on an H200.
    """
    products = (
        problem.out_channels // problem.groups * prod(problem.kernel),
        problem.batch * prod(problem.in_size),
        problem.batch * prod(problem.out_size),
    )
    tf32 = problem.tf32 and problem.dtype == "float32"
    of_sums = 4 * torch.finfo(torch.float32).eps if tf32 else 0.0
    return {
        name: accuracy.limit(problem, count) + of_sums * sqrt(count)
        for name, count in zip(_names(problem), products, strict=False)
    }


def _names(problem: Problem) -> tuple[str, ...]:
    return NAMES if problem.bias else NAMES[:2]


def errors(
    inputs: Inputs, grad_output: Tensor, problem: Problem, results: Sequence[tuple[Tensor, ...]]
) -> list[dict[str, float]]:
    """The largest distance of each gradient from float64, as a share of the largest reference.

    A gradient of another shape or with a NaN is infinitely wrong.
    """
    gaps = [dict.fromkeys(_names(problem), 0.0) for _ in results]
    largest = dict.fromkeys(_names(problem), 0.0)

    def compare(name: str, exact: Tensor, samples: slice | None = None) -> None:
        largest[name] = max(largest[name], float(exact.abs().max()))
        for gap, gradients in zip(gaps, results, strict=True):
            found = gradients[NAMES.index(name)]
            found = found if samples is None else found[samples]
            distance = float("inf")
            if found.shape == exact.shape:
                distance = float((found.double() - exact).abs().max())
            gap[name] = max(gap[name], distance if distance == distance else float("inf"))

    by_weight = torch.zeros_like(inputs.weight, dtype=torch.float64)
    by_bias = by_weight.new_zeros(problem.out_channels)
    for samples, by_input, weight_part, bias_part in _reference(inputs, grad_output, problem):
        compare("input", by_input, samples)
        by_weight += weight_part
        by_bias += bias_part
    compare("weight", by_weight)
    if problem.bias:
        compare("bias", by_bias)
    return [{name: gap[name] / (largest[name] or 1.0) for name in gap} for gap in gaps]


def _reference(
    inputs: Inputs, grad_output: Tensor, problem: Problem
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Samples, the gradient of that input, and their share of those of weight and bias."""
    groups, kernel = problem.groups, problem.kernel
    channels = (problem.in_channels // groups, problem.out_channels // groups)
    weight = inputs.weight.double().reshape(groups, *channels, *kernel)
    pixels = prod(problem.in_size) + prod(problem.out_size)
    sample_bytes = 8 * pixels * max(problem.in_channels, problem.out_channels)
    step = max(1, min(problem.batch, CHUNK_BYTES // max(1, sample_bytes)))
    for start in range(0, problem.batch, step):
        samples = slice(start, min(start + step, problem.batch))
        x = inputs.x[samples].double().reshape(-1, groups, channels[0], prod(problem.in_size))
        gy = grad_output[samples].double()
        around = _padded(gy, problem)
        by_input = torch.zeros_like(x)
        by_weight = torch.zeros_like(weight)
        for tap in product(*map(range, kernel)):
            met = _met_by(around, problem, tap).reshape(*x.shape[:2], channels[1], x.shape[3])
            place: tuple[slice | int, ...] = (slice(None), slice(None), slice(None), *tap)
            by_input += weight[place] @ met
            by_weight[place] = (x @ met.mT).sum(0)
        shape = (-1, problem.in_channels, *problem.in_size)
        pixel_dims = (0, *range(2, gy.dim()))
        weight_part = by_weight.reshape(inputs.weight.shape)
        yield samples, by_input.reshape(shape), weight_part, gy.sum(pixel_dims)


def _padded(grad_output: Tensor, problem: Problem) -> Tensor:
    """With zeros around, so that every tap finds a value for every input."""
    margins: list[int] = []
    for axis in reversed(range(problem.ndim)):
        size, kernel, stride, padding, _, dilation = problem.dimensions[axis]
        reach = (size - 1) * stride + (kernel - 1) * dilation + 1
        margins += [padding, max(0, reach - padding - grad_output.shape[2 + axis])]
    return F.pad(grad_output, margins)


def _met_by(padded: Tensor, problem: Problem, tap: Sequence[int]) -> Tensor:
    """For every input, the value of grad_output that the tap connects it with."""
    places = tuple(
        slice(k * dilation, k * dilation + (size - 1) * stride + 1, stride)
        for k, (size, _, stride, _, _, dilation) in zip(tap, problem.dimensions, strict=True)
    )
    return padded[(slice(None), slice(None), *places)]
