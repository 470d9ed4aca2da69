"""How right a result is: the same inputs for everybody, compared with PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod, sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .planner import Problem

Operator = Callable[..., Tensor]
TORCH_OPERATORS: dict[int, Operator] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def upconv_operator(ndim: int) -> Operator:
    """The function under test."""
    from . import functional

    operator: Operator = getattr(functional, f"conv_transpose{ndim}d")
    return operator


REFERENCE_BYTES = 256 << 20
"""Scratch of one float64 reference call: PyTorch unfolds it, 4.8 GB for a 1024x1024 image whole."""


class Inputs(NamedTuple):
    """The tensors of a problem and its options, in the order the operators take them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    options: tuple[list[int], list[int], list[int], int, list[int]]

    def run(self, operator: Operator) -> Tensor:
        return operator(self.x, self.weight, self.bias, *self.options)


def options_of(problem: Problem) -> tuple[list[int], list[int], list[int], int, list[int]]:
    return (
        list(problem.stride),
        list(problem.padding),
        list(problem.output_padding),
        problem.groups,
        list(problem.dilation),
    )


def reduction(problem: Problem) -> int:
    """Most products that one output adds up."""
    per_phase = prod(
        -(-kernel // stride) for kernel, stride in zip(problem.kernel, problem.stride, strict=True)
    )
    return problem.in_channels // problem.groups * per_phase


def make_inputs(problem: Problem, device: str = "cpu", seed: int = 0) -> Inputs:
    """Normal numbers, the weight scaled so that outputs are of size 1."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    x = normal(problem.batch, problem.in_channels, *problem.in_size).to(dtype)
    weight = normal(problem.in_channels, problem.out_channels // problem.groups, *problem.kernel)
    weight = (weight / sqrt(reduction(problem))).to(dtype)
    bias = normal(problem.out_channels).to(dtype) if problem.bias else None
    if problem.channels_last:
        x = x.to(memory_format=torch.channels_last if problem.ndim == 2 else torch.channels_last_3d)
    return Inputs(x, weight, bias, options_of(problem))


def errors(inputs: Inputs, problem: Problem, results: Sequence[Tensor]) -> list[float]:
    """The largest distance of each result from float64, as a share of the largest output.

    The reference is made one sample and a few output channels at a time, so that it fits beside
    large outputs. A result of another shape or with a NaN is infinitely wrong.
    """
    worst = [0.0] * len(results)
    largest = 0.0
    shape = (problem.batch, problem.out_channels, *problem.out_size)
    for n in range(problem.batch):
        for channels, reference in _reference(inputs, problem, n):
            largest = max(largest, float(reference.abs().max()))
            for index, result in enumerate(results):
                if tuple(result.shape) != shape:
                    worst[index] = float("inf")
                    continue
                gap = float((result[n, channels].double() - reference).abs().max())
                worst[index] = max(worst[index], gap if gap == gap else float("inf"))
    return [error / largest if largest else error for error in worst]


def _reference(inputs: Inputs, problem: Problem, n: int) -> Iterator[tuple[slice, Tensor]]:
    """Sample `n` of the output in float64, piece by piece: which channels, and their values."""
    groups, operator = problem.groups, TORCH_OPERATORS[problem.ndim]
    stride, padding, output_padding, _, dilation = inputs.options
    per_group_in, per_group_out = problem.in_channels // groups, problem.out_channels // groups
    unfolded = prod(problem.kernel) * prod(problem.in_size) * 8
    step = max(1, min(per_group_out, REFERENCE_BYTES // max(1, unfolded)))
    for group in range(groups):
        rows = slice(group * per_group_in, (group + 1) * per_group_in)
        x = inputs.x[n : n + 1, rows].contiguous().double()
        for start in range(0, per_group_out, step):
            stop = min(start + step, per_group_out)
            channels = slice(group * per_group_out + start, group * per_group_out + stop)
            weight = inputs.weight[rows, start:stop].double()
            bias = None if inputs.bias is None else inputs.bias[channels].double()
            with torch.no_grad():
                y = operator(x, weight, bias, stride, padding, output_padding, 1, dilation)
            yield channels, y[0]


def limit(problem: Problem, products: int | None = None) -> float:
    """The error that rounding explains: each product's, grown as sqrt(n), and the output's own.

    `products` is n, by default that of the output.

    Both with room to spare (4 times), since the largest of millions of outputs is looked at; a
    wrong tap or a lost edge is an error of about 0.1 and cannot hide below it.
    """
    output = torch.finfo(getattr(torch, problem.dtype)).eps
    if problem.dtype == "float32" and problem.tf32:
        product = 2.0**-11
    else:
        count = reduction(problem) if products is None else products
        product = min(output, torch.finfo(torch.float32).eps) * sqrt(count)
    return 4 * product + output
