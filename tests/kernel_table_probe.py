"""Runs in a process of its own, with a library as argument: see test_gradient_binding.py."""

from __future__ import annotations

import sys

import torch

from upconv import libraries, plans

KEY = [plans.DEVICE_KINDS.index("cuda"), *([0] * (len(plans.KEY_HEADER) - 1))]
TYPES = {
    "tf32": ("float32", 1),
    "strict": ("float32", 0),
    "bf16": ("bfloat16", 0),
    "fp16": ("float16", 0),
    "float64": ("float64", 0),
}


def found(kernel: str) -> dict[str, str]:
    """The rows that plans of a kernel get, by the type of their call."""
    names = {}
    for name, (dtype, tf32) in TYPES.items():
        key = list(KEY)
        key[plans.KEY_HEADER.index("dtype")] = plans.DTYPES.index(dtype)
        key[plans.KEY_HEADER.index("tf32")] = tf32
        names[name] = torch.ops.upconv_probe.found(key, plans.KERNEL_IDS[kernel])
    return names


def main() -> None:
    torch.ops.load_library(sys.argv[1])
    nothing_more = {"tf32": "own", "strict": "", "bf16": "own", "fp16": "", "float64": ""}
    assert found("mma_fprop") == nothing_more
    loaded = torch.library.Library("upconv", "IMPL")
    for kind, table in (
        ("cuda_strict", torch.ops.upconv_probe.table_of_strict),
        ("cuda_fp16", torch.ops.upconv_probe.table_of_fp16),
    ):
        assert not libraries.compiled(kind)
        loaded.impl(f"_{kind}_kernels", table, "CompositeExplicitAutograd")
        assert libraries.compiled(kind)
        assert found("mma_fprop")[kind.removeprefix("cuda_")] == kind.removeprefix("cuda_")
    assert found("mma_fprop") == nothing_more | {"strict": "strict", "fp16": "fp16"}
    assert set(found("direct_fprop").values()) == {"direct"}
    assert set(found("sm90_patch").values()) == {""}
    print("fine")


main()
