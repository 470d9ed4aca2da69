"""What all kernels ask for that read contiguous tensors on NVIDIA GPUs without WGMMA."""

from __future__ import annotations

from collections.abc import Container

from .problem import Hardware, Problem

OLDEST = (8, 0)
"""Compute capability."""


def first_refusal(problem: Problem, hardware: Hardware, dtypes: Container[str]) -> str | None:
    """Why none of them can serve, or None."""
    if hardware.kind != "cuda":
        return "needs a CUDA GPU"
    if hardware.capability < OLDEST:
        least, given = (f"{major}.{minor}" for major, minor in (OLDEST, hardware.capability))
        return f"needs compute capability {least} or later, this GPU has {given}"
    if problem.dtype not in dtypes:
        return f"has no {problem.dtype} form"
    if problem.channels_last:
        return "covers the contiguous layout only"
    if problem.batch == 0 or min(*problem.in_size, *problem.out_size) <= 0:
        return "nothing to compute"
    return None
