"""The kernel families that can be exported: what of the planner and of csrc each one is made of.

A new family is one entry in FAMILIES, and a file under csrc/export with its entry points
(`upconv_plan`, `upconv_scratch_bytes`, `upconv_forward`, as in csrc/export/sm90_wgmma_fprop.cu).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..jit.recipe import CUDA_CFLAGS, gencode
from ..planner import Candidate, Hardware, Problem, Refusal, direct, mma, sm90
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
    """By dtype; "tf32" is float32 rounded to TF32, "float32" is computed as such."""
    sources: tuple[str, ...]
    """Patterns below csrc; `{operand}` stands for the operand's name."""
    operand_list: str
    """The macro that lists the operands, X(index, name) each, on a line of its own."""
    about: str
    """What the kernel is, in a line for the exported file."""

    def form(self, dtype: str, tf32: bool) -> str | None:
        """Which of the operands serves a dtype; None if none. TF32 need not be made use of."""
        forms = ["tf32", dtype] if tf32 and dtype == "float32" else [dtype]
        return next((form for form in forms if form in self.operands), None)

    def source(self, form: str) -> str:
        """All CUDA code for one kind of operand, as one text."""
        operand = self.operands[form]
        text = cuda_source.bundle(file.format(operand=operand.name) for file in self.sources)
        others = [o.type for o in self.operands.values() if o.type != operand.type]
        return self._one_operand(cuda_source.without_types(text, others), operand)

    def _one_operand(self, text: str, operand: Operand) -> str:
        """The list of operands cut down to one, so that nothing refers to the others."""
        head = f"#define {self.operand_list}(X)"
        line = re.compile(rf"^{re.escape(head)} (.*[^\\\n])$", re.M)
        entry = f"X({operand.index}, {operand.name})"
        if [entry in found for found in line.findall(text)] != [True]:
            raise ExportError(f"the sources should hold one line `{head} ... {entry} ...`")
        return line.sub(f"{head} {entry}", text)


def flags(capability: tuple[int, int]) -> tuple[str, ...]:
    """nvcc's."""
    return (*CUDA_CFLAGS, gencode(capability))


SM90 = Family(
    kernel=sm90.KERNEL,
    module="sm90",
    consider=sm90.consider,
    operands={
        "tf32": Operand(0, "tf32", "Tf32"),
        "bfloat16": Operand(1, "bf16", "Bf16"),
        "float16": Operand(2, "fp16", "Fp16"),
        "float32": Operand(3, "split", "Split"),
    },
    sources=(
        "cuda/sm90_{operand}*.cu",
        "cuda/sm90_launch.cu",
        "cuda/shared_memory.cu",
        "export/sm90_wgmma_fprop.cu",
    ),
    operand_list="UPCONV_OPERANDS",
    about="WGMMA on Hopper, straight on the layout of the tensors",
)

MMA = Family(
    kernel=mma.KERNEL,
    module="mma",
    consider=mma.consider,
    operands={
        "tf32": Operand(0, "tf32", "MmaTf32"),
        "bfloat16": Operand(1, "bf16", "MmaBf16"),
        "float16": Operand(2, "fp16", "MmaFp16"),
        "float32": Operand(3, "split", "MmaSplit"),
    },
    sources=(
        "cuda/mma_{operand}.cu",
        "cuda/mma_launch.cu",
        "cuda/shared_memory.cu",
        "export/mma_fprop.cu",
    ),
    operand_list="UPCONV_OPERANDS",
    about="mma.sync, for groups, three dimensions and GPUs without WGMMA",
)

DIRECT = Family(
    kernel=direct.KERNEL,
    module="direct",
    consider=direct.consider,
    operands={
        "float32": Operand(0, "float32", "float"),
        "float64": Operand(1, "float64", "double"),
        "bfloat16": Operand(2, "bfloat16", "__nv_bfloat16"),
        "float16": Operand(3, "float16", "__half"),
    },
    sources=(
        "cuda/direct_{operand}.cu",
        "cuda/direct_launch.cu",
        "cuda/shared_memory.cu",
        "export/direct_fprop.cu",
    ),
    operand_list="UPCONV_TYPES",
    about="on the CUDA cores, for few channels a group",
)

FAMILIES = (SM90, MMA, DIRECT)
"""The one that covers the layer and is expected to be the fastest is exported."""
