"""What the tests of every GPU kernel ask of a result."""

from __future__ import annotations

import torch


def distance(y: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the norm of what is expected; infinite where y has a NaN."""
    assert y.shape == expected.shape
    if not bool(torch.isfinite(y).all()):
        return float("inf")
    return float((y.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def poison(shape: torch.Size, dtype: torch.dtype) -> None:
    """Leaves NaNs in the memory that the next allocation of this size will get."""
    torch.full(shape, float("nan"), dtype=dtype, device="cuda")
