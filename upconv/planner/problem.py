"""One transposed convolution, and one machine, as plain frozen values.

A `Problem` says what is to be computed, a `Hardware` says on what. Both are hashable and hold no
tensor, so that a plan can be made, printed, cached and tested on a machine that has neither torch
nor a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from .geometry import output_size

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DIRECTIONS = ("forward", "grad_input", "grad_weight")
"""What a call computes: the layer itself, or one of its gradients."""


def three(values: Sequence[int], absent: int) -> tuple[int, int, int]:
    """Depth, height and width, where a problem may have fewer dimensions."""
    z, y, x = (absent,) * (3 - len(values)) + tuple(values)
    return z, y, x


@dataclass(frozen=True)
class Problem:
    """A transposed convolution of `len(in_size)` spatial dimensions, or one of its gradients.

    Sizes and channels are those of the forward pass in every direction.

    `dtype` is torch's name without the prefix ("float32"). `channels_last` is the memory layout of
    input and output. `tf32` says that float32 products may be rounded to TF32, as
    `torch.backends.cudnn.conv.fp32_precision == "tf32"` allows; it means nothing for other dtypes.
    """

    batch: int
    in_channels: int
    out_channels: int
    in_size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    bias: bool = True
    dtype: str = "float32"
    channels_last: bool = False
    tf32: bool = False
    direction: str = "forward"

    @staticmethod
    def of(
        batch: int,
        in_channels: int,
        out_channels: int,
        in_size: Sequence[int],
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        **rest: object,
    ) -> Problem:
        """The same, with PyTorch's shorthand: one integer stands for every dimension."""

        def each(value: int | Sequence[int]) -> tuple[int, ...]:
            if isinstance(value, int):
                return (value,) * len(in_size)
            return tuple(int(v) for v in value)

        return Problem(
            batch,
            in_channels,
            out_channels,
            tuple(in_size),
            each(kernel),
            each(stride),
            each(padding),
            each(output_padding),
            each(dilation),
            groups,
            **rest,  # type: ignore[arg-type]
        )

    @property
    def ndim(self) -> int:
        """Number of spatial dimensions: 1, 2 or 3."""
        return len(self.in_size)

    def in_three(self) -> Problem:
        """The same in three dimensions: 2-D with one slice, 1-D with one row as well."""
        return replace(
            self,
            in_size=three(self.in_size, 1),
            kernel=three(self.kernel, 1),
            stride=three(self.stride, 1),
            padding=three(self.padding, 0),
            output_padding=three(self.output_padding, 0),
            dilation=three(self.dilation, 1),
        )

    @property
    def dimensions(self) -> tuple[tuple[int, int, int, int, int, int], ...]:
        """Each dimension by itself: size, kernel, stride, padding, output padding, dilation."""
        return tuple(
            zip(
                self.in_size,
                self.kernel,
                self.stride,
                self.padding,
                self.output_padding,
                self.dilation,
                strict=True,
            )
        )

    @property
    def out_size(self) -> tuple[int, ...]:
        return tuple(output_size(*dimension) for dimension in self.dimensions)

    @property
    def strict(self) -> bool:
        """Must float32 keep all its bits?"""
        return self.dtype == "float32" and not self.tf32

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def weight_elements(self) -> int:
        return self.in_channels * self.out_channels // self.groups * prod(self.kernel)

    @property
    def flops(self) -> int:
        """Multiplications and additions, two per product, as if no tap fell outside the output.

        Taps that padding cuts off are counted: that is the convention of the published floors.
        """
        return 2 * self.batch * prod(self.in_size) * self.weight_elements

    @property
    def bytes(self) -> int:
        """Least traffic: input and weight read once, output written once."""
        x = self.batch * self.in_channels * prod(self.in_size)
        y = self.batch * self.out_channels * prod(self.out_size)
        b = self.out_channels if self.bias else 0
        return (x + self.weight_elements + y + b) * self.element_bytes


@dataclass(frozen=True)
class Hardware:
    """What the planner must know of the machine. `kind` is "cpu" or "cuda"."""

    kind: str
    name: str = ""
    threads: int = 1
    """CPU: threads torch uses."""
    isa: str = ""
    """CPU: "avx512", "avx2" or "scalar"."""
    native_16bit: bool = False
    """CPU: multiplies 16-bit numbers in hardware (AVX-512 BF16, AMX); PyTorch makes use of it."""
    capability: tuple[int, int] = (0, 0)
    """CUDA: compute capability."""
    multiprocessors: int = 0
    shared_memory: int = 0
    """CUDA: bytes of shared memory one block may have."""


H200 = Hardware(
    "cuda",
    name="NVIDIA H200",
    capability=(9, 0),
    multiprocessors=132,
    shared_memory=227 * 1024,
)
"""The GPU the floors were measured on; lets the planner be tried without one."""
