"""The benchmark cases: layers that people run, each with the batch and size it is measured at.

The kbNN rows are the transposed convolutions of KernelBench level 1; the others are layers of
well-known networks. Other shapes matter as much: tune for the operator, not for this list.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from .planner import Problem

Sizes = int | tuple[int, ...]
"""One integer stands for every dimension, as in PyTorch."""


class Case(NamedTuple):
    name: str
    batch: int
    in_channels: int
    out_channels: int
    in_size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: Sizes
    padding: Sizes
    output_padding: Sizes
    dilation: Sizes
    groups: int

    @property
    def ndim(self) -> int:
        return len(self.in_size)

    def problem(
        self,
        batch: int | None = None,
        dtype: str = "float32",
        channels_last: bool = False,
        tf32: bool = False,
        bias: bool = True,
    ) -> Problem:
        """The case as the planner sees it; `batch` replaces the case's own."""
        return Problem.of(
            self.batch if batch is None else batch,
            *self[2:],
            bias=bias,
            dtype=dtype,
            channels_last=channels_last,
            tf32=tf32,
        )


CASES = (
    # KernelBench level 1, 2-D
    Case("kb69", 64, 64, 128, (128, 256), (3, 5), 1, 0, 0, 1, 1),
    Case("kb65", 8, 64, 64, (512, 512), (3, 7), 1, 0, 0, 1, 1),
    Case("kb57", 8, 64, 64, (1024, 1024), (3, 3), 1, 0, 0, 1, 1),
    Case("kb71", 8, 32, 32, (512, 1024), (3, 3), 1, 0, 0, 1, 1),
    Case("kb78", 8, 32, 32, (512, 1024), (3, 7), 1, (1, 3), 0, 1, 1),
    Case("kb75", 16, 32, 64, (128, 256), (3, 5), (2, 3), (1, 2), 0, (2, 1), 4),
    Case("kb81", 16, 32, 64, (64, 128), (3, 3), 5, 1, 0, 2, 1),
    # layers of well-known networks
    Case("dcgan1", 128, 512, 256, (8, 8), (4, 4), 2, 1, 0, 1, 1),
    Case("dcgan3", 128, 128, 64, (32, 32), (4, 4), 2, 1, 0, 1, 1),
    Case("unet_up1", 16, 1024, 512, (32, 32), (2, 2), 2, 0, 0, 1, 1),
    Case("unet_up4", 16, 128, 64, (256, 256), (2, 2), 2, 0, 0, 1, 1),
    Case("pose_head", 64, 256, 256, (64, 48), (4, 4), 2, 1, 0, 1, 1),
    Case("mask_head", 512, 256, 256, (14, 14), (2, 2), 2, 0, 0, 1, 1),
    Case("fcn_bilinear", 8, 21, 21, (64, 64), (16, 16), 8, 4, 0, 1, 21),
    Case("fsrcnn", 8, 56, 1, (256, 256), (9, 9), 3, 4, 2, 1, 1),
    # KernelBench level 1 and networks, 1-D and 3-D
    Case("kb64_1d", 64, 128, 128, (65536,), (3,), 1, 0, 0, 1, 1),
    Case("kb74_1d", 32, 32, 64, (131072,), (5,), 1, 0, 0, 3, 1),
    Case("kb79_1d", 16, 32, 64, (131072,), (3,), 2, 1, 0, 2, 1),
    Case("hifigan1_1d", 16, 512, 256, (512,), (16,), 8, 4, 0, 1, 1),
    Case("hifigan3_1d", 16, 128, 64, (32768,), (4,), 2, 1, 0, 1, 1),
    Case("kb58_3d", 16, 32, 16, (16, 32, 64), (3, 5, 7), 1, 0, 0, 1, 1),
    Case("kb61_3d", 8, 48, 48, (64, 64, 64), (3, 3, 3), 1, 0, 0, 1, 1),
    Case("kb70_3d", 8, 48, 24, (96, 96, 96), (3, 3, 3), 1, 0, 0, 1, 1),
    Case("kb72_3d", 8, 32, 32, (12, 24, 48), (3, 5, 7), 2, (1, 2, 3), 1, 1, 4),
    Case("kb77_3d", 16, 32, 64, (16, 32, 32), (3, 3, 3), 2, 1, 0, 2, 1),
    Case("nnunet_3d", 2, 64, 32, (64, 80, 64), (2, 2, 2), 2, 0, 0, 1, 1),
)


def select(patterns: list[str], dimensions: set[int] | None = None) -> list[Case]:
    """The cases whose name matches a pattern ("kb*"), in the order of the list; none given: all.

    A pattern that matches nothing is a mistake of the caller: ValueError with the names there are.
    """
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in CASES):
            known = ", ".join(case.name for case in CASES)
            raise ValueError(f"no case is called {pattern!r}; there are {known}")
    return [
        case
        for case in CASES
        if (not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns))
        and (dimensions is None or case.ndim in dimensions)
    ]
