"""Drawn transposed convolutions: any parameters, dtypes and memory layouts that PyTorch accepts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "channels_last", "transposed", "sliced", "expanded")


@dataclass(frozen=True)
class Case:
    """One call. `batch` None is an unbatched input; layouts are LAYOUTS."""

    ndim: int
    dtype: torch.dtype
    batch: int | None
    in_channels: int
    out_channels: int
    groups: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    bias: bool
    input_layout: str
    weight_layout: str
    seed: int

    @property
    def parameters(self) -> tuple[object, ...]:
        return (self.stride, self.padding, self.output_padding, self.groups, self.dilation)

    def tensors(
        self, device: str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Input, weight and bias, each a leaf that records gradients."""
        generator = torch.Generator().manual_seed(self.seed)
        batch = () if self.batch is None else (self.batch,)
        x_shape = (*batch, self.in_channels, *self.size)
        w_shape = (self.in_channels, self.out_channels // self.groups, *self.kernel)

        def leaf(shape: tuple[int, ...], layout: str) -> torch.Tensor:
            values = arranged(torch.randn(shape, generator=generator).to(self.dtype), layout)
            return on_device(values, device).requires_grad_()

        bias = leaf((self.out_channels,), "contiguous") if self.bias else None
        return leaf(x_shape, self.input_layout), leaf(w_shape, self.weight_layout), bias


def arranged(values: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor of the same shape in another memory layout; expanded: its first slice repeated."""
    if layout == "channels_last":
        # Also for tensors PyTorch has no such format for: the channels are put last in memory.
        channels = 0 if values.dim() == 2 else 1
        return values.movedim(channels, -1).contiguous().movedim(-1, channels)
    if layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        doubled = values.repeat_interleave(2, dim=-1)
        return doubled[..., ::2]
    if layout == "expanded" and values.shape[0] > 0:
        return values[:1].expand(values.shape)
    return values


def on_device(values: torch.Tensor, device: str) -> torch.Tensor:
    """The same strides on another device; `Tensor.to` would keep them only where it is dense."""
    if device == "cpu":
        return values.detach()
    storage = torch.as_strided(
        values, (values.untyped_storage().nbytes() // values.itemsize,), (1,)
    )
    moved = storage.to(device)
    return moved.as_strided(values.shape, values.stride(), values.storage_offset()).detach()


@st.composite
def cases(draw: st.DrawFn, ndim: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Case:
    """Small sizes, so that every dimension meets its edges often."""
    largest = {1: 12, 2: 7, 3: 4}[ndim]
    groups = draw(st.sampled_from((1, 1, 1, 2, 3, 4)))
    size, kernel, stride, padding, extra, dilation = [], [], [], [], [], []
    for _ in range(ndim):
        length = draw(st.integers(1, largest))
        taps = draw(st.integers(1, 4 if ndim == 3 else 5))
        step = draw(st.integers(1, 4))
        spread = draw(st.integers(1, 3))
        more = draw(st.integers(0, max(step, spread) - 1))
        whole = (length - 1) * step + spread * (taps - 1) + more + 1
        size.append(length)
        kernel.append(taps)
        stride.append(step)
        dilation.append(spread)
        extra.append(more)
        padding.append(draw(st.integers(0, min(4, (whole - 1) // 2))))
    return Case(
        ndim=ndim,
        dtype=draw(st.sampled_from(dtypes)),
        batch=draw(st.sampled_from((1, 2, 3, None, 0))),
        in_channels=groups * draw(st.integers(1, 5)),
        out_channels=groups * draw(st.integers(1, 9)),
        groups=groups,
        size=tuple(size),
        kernel=tuple(kernel),
        stride=tuple(stride),
        padding=tuple(padding),
        output_padding=tuple(extra),
        dilation=tuple(dilation),
        bias=draw(st.booleans()),
        input_layout=draw(st.sampled_from(LAYOUTS)),
        weight_layout=draw(st.sampled_from(("contiguous", *LAYOUTS))),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def unaligned_planes(draw: st.DrawFn, most_rows: int) -> tuple[int, int]:
    """Height and even width of 16-bit planes whose rows have at most 128 bytes, and of which no
    number of rows that divides the height has a multiple of 16 bytes."""
    step = draw(st.sampled_from([2, 4]))
    width = step * (2 * draw(st.integers(0, 64 // (2 * step) - 1)) + 1)
    height = draw(st.integers(1, most_rows).filter(lambda n: n * step % 8))
    return height, width
