"""The kernel families that can be exported: what of the planner and of csrc each one is made of.

A new family is one entry in FAMILIES, and a file under csrc/export with its entry points
(`upconv_plan`, `upconv_scratch_bytes`, `upconv_forward`, as in csrc/export/sm90_wgmma_fprop.cu).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..jit.recipe import CUDA_CFLAGS
from ..planner import Candidate, Hardware, Problem, Refusal, sm90
from . import cuda_source
from .errors import ExportError


@dataclass(frozen=True)
class Operand:
    """A dtype as a family's sources know it."""

    index: int
    name: str
    """As in the names of files and functions."""
    type: str
    """As in C++."""


@dataclass(frozen=True)
class Family:
    kernel: str
    module: str
    """Of the planner: defines `consider`."""
    consider: Callable[[Problem, Hardware], Candidate | Refusal]
    operands: dict[str, Operand]
    """By dtype."""
    sources: tuple[str, ...]
    """Below csrc; `{operand}` stands for the operand's name."""
    gencode: tuple[str, ...]
    about: str
    """What the kernel is, in a line for the exported file."""

    def source(self, dtype: str) -> str:
        """All CUDA code for one dtype, as one text."""
        operand = self.operands[dtype]
        text = cuda_source.bundle(file.format(operand=operand.name) for file in self.sources)
        others = [o.type for o in self.operands.values() if o.type != operand.type]
        return _one_operand(cuda_source.without_types(text, others), operand)

    @property
    def flags(self) -> tuple[str, ...]:
        return (*CUDA_CFLAGS, *self.gencode)


def _one_operand(text: str, operand: Operand) -> str:
    """The list of operands cut down to one, so that nothing refers to the others."""
    line = re.compile(r"^#define UPCONV_OPERANDS\(X\) .*$", re.M)
    if len(line.findall(text)) != 1:
        raise ExportError("the sources should define UPCONV_OPERANDS(X) once, on a line of its own")
    return line.sub(f"#define UPCONV_OPERANDS(X) X({operand.index}, {operand.name})", text)


SM90 = Family(
    kernel=sm90.KERNEL,
    module="sm90",
    consider=sm90.consider,
    operands={
        "float32": Operand(0, "tf32", "Tf32"),
        "bfloat16": Operand(1, "bf16", "Bf16"),
        "float16": Operand(2, "fp16", "Fp16"),
    },
    sources=(
        "cuda/sm90_{operand}.cu",
        "cuda/sm90_launch.cu",
        "export/sm90_wgmma_fprop.cu",
    ),
    gencode=("-gencode=arch=compute_90a,code=sm_90a",),
    about="WGMMA on Hopper (compute capability 9.0), straight on the layout of the tensors",
)

FAMILIES = (SM90,)
"""In order of preference: the first that covers the layer is exported."""
