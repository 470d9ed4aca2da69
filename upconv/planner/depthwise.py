"""What the planners of the gradients of depthwise layers share: when they may serve, and sizes.

csrc/cuda/depthwise_igrad.cuh and depthwise_wgrad.cuh tell the idea. grad_output is cut into blocks
of stride elements; "reach" is how many of them a pixel meets along a dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod

from .legality import first_refusal
from .operands import OPERANDS
from .problem import Hardware, Problem, three

COLUMNS = 4
"""Of grad_output in a thread."""
MOST_THREADS = 256
PAD = 8
"""Places of shared memory before one that is left out, where columns are a power of 2 apart."""
MOST_PAD = 32
MOST_REACH = 2
SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, for all of its blocks, each of which costs 1 KiB more than it asks for."""
REGISTERS = 65536
MOST_PIXELS = 1 << 30

CLOCK_MHZ = 1750.0


@dataclass(frozen=True)
class Layer:
    """A problem in three dimensions. The images of a signal are the rows of one ("folded")."""

    problem: Problem

    @cached_property
    def folded(self) -> bool:
        return self.problem.ndim == 1

    @property
    def images(self) -> int:
        return 1 if self.folded else self.problem.batch

    @property
    def channels(self) -> int:
        return self.problem.in_channels

    @cached_property
    def in_size(self) -> tuple[int, int, int]:
        z, y, x = three(self.problem.in_size, 1)
        return z, self.problem.batch if self.folded else y, x

    @cached_property
    def out_size(self) -> tuple[int, int, int]:
        z, y, x = three(self.problem.out_size, 1)
        return z, self.problem.batch if self.folded else y, x

    @cached_property
    def kernel(self) -> tuple[int, int, int]:
        return three(self.problem.kernel, 1)

    @cached_property
    def stride(self) -> tuple[int, int, int]:
        return three(self.problem.stride, 1)

    @cached_property
    def padding(self) -> tuple[int, int, int]:
        return three(self.problem.padding, 0)

    @cached_property
    def dilation_z(self) -> int:
        return three(self.problem.dilation, 1)[0]

    @property
    def reach_y(self) -> int:
        return -(-self.kernel[1] // self.stride[1])

    @property
    def reach_x(self) -> int:
        return -(-self.kernel[2] // self.stride[2])

    @property
    def period(self) -> int:
        """Columns after which places in blocks and in vectors repeat together."""
        return lcm(self.stride[2], COLUMNS)

    @property
    def element(self) -> int:
        return self.problem.element_bytes

    @property
    def vector(self) -> int:
        """Bytes that are copied at a time: all of a thread's columns where rows begin on them."""
        row = self.out_size[2] * self.element
        return next(n for n in (4 * self.element, 2 * self.element, self.element) if row % n == 0)

    @property
    def pieces(self) -> int:
        return COLUMNS * self.element // self.vector

    def fields(self) -> dict[str, int]:
        """Those of csrc/cuda/depthwise_params.h that are the layer's."""

        def named(name: str, names: str, values: tuple[int, int, int]) -> dict[str, int]:
            return {f"{name}_{n}": value for n, value in zip(names, values, strict=True)}

        return {
            "images": self.images,
            "channels": self.channels,
            **named("in", "dhw", self.in_size),
            **named("out", "dhw", self.out_size),
            **named("kernel", "zyx", self.kernel),
            **named("stride", "zyx", self.stride),
            **named("padding", "zyx", self.padding),
            "dilation_z": self.dilation_z,
        }


def legality(problem: Problem, hardware: Hardware) -> str | None:
    """Why neither kernel can serve, or None."""
    reason = first_refusal(problem, hardware, OPERANDS)
    if reason:
        return reason
    if not problem.groups == problem.in_channels == problem.out_channels:
        return "takes one channel a group, in and out"
    return shape_legality(problem) or size_legality(problem)


def shape_legality(problem: Problem) -> str | None:
    """Why kernel, stride and dilation do not suit, or None."""
    if problem.stride[-1] < 2:
        return "needs a stride along the width"
    for kernel, stride, dilation in list(
        zip(problem.kernel, problem.stride, problem.dilation, strict=True)
    )[-2:]:
        if kernel > 1 and dilation > 1:
            return "takes no dilation of height or width"
        if kernel > MOST_REACH * stride:
            return (
                f"a kernel of {kernel} with stride {stride}:"
                f" it takes {MOST_REACH} times the stride at most"
            )
    if Layer(problem).period // COLUMNS > MOST_THREADS:
        return f"a stride of {problem.stride[-1]} is too wide for a thread block"
    return None


def size_legality(problem: Problem) -> str | None:
    """Which of the kernels' 32-bit numbers would be too small, or None."""
    widest = max(n * s + k * d + 2 * p for n, k, s, p, _, d in problem.dimensions)
    rows = problem.batch * problem.in_channels * prod(problem.out_size[:-1])
    if max(widest, rows) >= MOST_PIXELS:
        return "2^30 rows or more, or rows of as many pixels"
    if problem.in_channels * prod(problem.kernel) >= MOST_PIXELS:
        return "the weight has 2^30 elements or more"
    return None


def resident(threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that a multiprocessor holds."""
    warps = -(-threads // 32)
    return max(
        1,
        min(
            REGISTERS // (registers * 32 * warps),
            SHARED_BYTES // (shared_bytes + 1024),
            64 // warps,
            32,
        ),
    )


def together(unhidden: float, *times: float) -> float:
    """Of what happens at the same time; a share of what takes less than the longest shows."""
    longest = max(times)
    return longest + unhidden * (sum(times) - longest)


def busy_cycles(blocks: int, places: int, most: int, issue: float, chain: float) -> float:
    """Of the multiprocessor with the most blocks, where `most` fit at a time: each takes the issue
    slots for so many cycles, and so many from its start to its end however few there are.
    """
    full, rest = divmod(blocks, places * most)
    cycles = full * max(most * issue, chain)
    return cycles + (max(-(-rest // places) * issue, chain) if rest else 0.0)
