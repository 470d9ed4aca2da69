"""The exported file: which kernel it gets, and its text from top to bottom."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill, indent

from ..explain import check
from ..planner import ATEN, H200, Candidate, Hardware, Problem, make_plan
from ..planner.problem import ELEMENT_BYTES
from ..version import __version__
from . import python_source, rules
from .errors import ExportError
from .families import FAMILIES, Family, flags
from .layers import Layer

RUNTIME = Path(__file__).with_name("runtime.py")

SHARED_MEMORY = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (10, 0): 227, (12, 0): 99}
"""KiB that one block may have, by compute capability; Hopper's is in H200."""


@dataclass(frozen=True)
class Rendered:
    text: str
    kernel: str
    note: str
    """What the user should know before using it; may be empty."""


def hardware(capability: tuple[int, int]) -> Hardware:
    """A GPU of that capability, for the question whether a kernel covers a layer there."""
    if capability == H200.capability:
        return H200
    if capability not in SHARED_MEMORY:
        known = ", ".join(f"{a}.{b}" for a, b in sorted([H200.capability, *SHARED_MEMORY]))
        major, minor = capability
        raise ExportError(f"unknown compute capability {major}.{minor}; choose from {known}")
    return Hardware(
        "cuda",
        name=f"compute capability {capability[0]}.{capability[1]}",
        capability=capability,
        multiprocessors=100,
        shared_memory=SHARED_MEMORY[capability] * 1024,
    )


@dataclass(frozen=True)
class Target:
    """What the file is for, besides the layer."""

    dtype: str = "float32"
    tf32: bool = True
    """float32 may be rounded to TF32."""
    capability: tuple[int, int] = (9, 0)


def render(
    layer: Layer, model_class: str, input_size: tuple[int, ...], target: Target, origin: str
) -> Rendered:
    """The file for a layer. ExportError where no kernel covers it on such an input."""
    if target.dtype not in ELEMENT_BYTES:
        raise ExportError(f"no export for {target.dtype!r}; choose from {', '.join(ELEMENT_BYTES)}")
    problem = layer.problem(input_size, target.dtype, target.tf32)
    check(problem)
    machine = hardware(target.capability)
    family, form = choose(layer, problem, machine)
    text = file_text(family, form, layer, model_class, target, origin)
    wrong = rules.violations(text, target.dtype)
    if wrong:
        raise ExportError(
            f"the file would break a rule of the harness it is for, a mistake in upconv's sources "
            f"for {family.kernel}:\n  " + "\n  ".join(wrong)
        )
    note = ""
    if make_plan(problem, machine).kernel == ATEN:
        note = "PyTorch's own operator is expected to be as fast or faster on this input"
    return Rendered(text, family.kernel, note)


def choose(layer: Layer, problem: Problem, machine: Hardware) -> tuple[Family, str]:
    """The fastest family that covers the problem, and the form of its operands."""
    found: list[tuple[float, int]] = []
    refusals = []
    for index, family in enumerate(FAMILIES):
        form = family.form(problem.dtype, problem.tf32)
        if form is None:
            strict = " without TF32" if problem.dtype == "float32" else ""
            refusals.append(f"{family.kernel}: has no {problem.dtype} form{strict}")
            continue
        answer = family.consider(replace(problem, tf32=form == "tf32"), machine)
        if isinstance(answer, Candidate):
            found.append((answer.microseconds, index))
        else:
            refusals.append(f"{family.kernel}: {answer.reason}")
    if found:
        family = FAMILIES[min(found)[1]]
        return family, family.form(problem.dtype, problem.tf32) or ""
    sizes = "x".join(map(str, (problem.batch, problem.in_channels, *problem.in_size)))
    raise ExportError(
        f"no kernel that can be exported covers {layer} on {sizes}, {problem.dtype}, "
        f"on {machine.name}:\n  "
        + "\n  ".join(refusals)
        + "\nAn exported file never falls back to PyTorch. In a program, upconv.accelerate(model) "
        "takes PyTorch's operator where no kernel of its own serves."
    )


def file_text(
    family: Family, form: str, layer: Layer, model_class: str, target: Target, origin: str
) -> str:
    names = ("Problem", "Hardware", "Refusal", "consider")
    planner = rules.reworded(python_source.bundle(family.module, names), rules.PYTHON_WORDS)
    cuda = rules.reworded(family.source(form), rules.CUDA_WORDS)
    if '"""' in cuda:
        raise ExportError('the CUDA sources hold """, which ends a Python text')
    runtime = RUNTIME.read_text()
    imports = runtime[runtime.index("\nimport ") : runtime.index("# BEGIN")].strip()
    code = runtime[runtime.index("# BEGIN") + len("# BEGIN") : runtime.index("# END")].strip()
    imports, code = (re.sub(r"  # (type: ignore|noqa).*", "", part) for part in (imports, code))
    returned = ", ".join(f"{name}={name}" for name in names)
    nvcc = "".join(f'    "{flag}",\n' for flag in flags(target.capability))
    return "\n".join(
        [
            '"""' + _docstring(family, form, layer, target, origin) + '\n"""\n',
            imports + "\n",
            f'_NAME = "upconv_{family.kernel}"',
            f"_DTYPE = torch.{target.dtype}",
            f"_TF32 = {form == 'tf32'}",
            f"_CUDA_FLAGS = (\n{nvcc})\n\n",
            model_class.strip() + "\n\n",
            code + "\n\n",
            _rule("The planner: which tile for which shape, as the integers that the kernel reads"),
            "\n\ndef _planner():",
            indent(planner, "    ", lambda line: line.strip() != ""),
            f"\n    return _SimpleNamespace({returned})\n\n",
            _rule("The kernel"),
            f'\n_CUDA_SOURCE = r"""\n{cuda.strip()}\n"""\n',
            "_PLANS = {}",
            "_PLANNER = _planner()",
            "_LIBRARY = _build()\n",
        ]
    )


def _rule(title: str) -> str:
    return f"# --- {title} {'-' * 90}"[:96]


def _docstring(family: Family, form: str, layer: Layer, target: Target, origin: str) -> str:
    major, minor = target.capability
    precision = ", computed in TF32," if form == "tf32" else ""
    paragraphs = [
        f"Generated by `upconv export` {__version__} from {origin}.",
        f"ModelNew computes {layer} for {target.dtype} tensors{precision} of any size, with the "
        f"kernel {family.kernel}: {family.about}. It needs PyTorch 2.9 or newer with CUDA, a GPU "
        f"of compute capability {major}.{minor}, and nvcc to build the kernel when this file is "
        "first imported.",
        "The same seed gives the same weights as PyTorch's layer: PyTorch's class holds and "
        "initialises them. The forward computation is the kernel's alone; a call that it cannot "
        "serve raises an error. The gradients are computed by PyTorch, in `_gradients`.",
        "In order: ModelNew; one call, from the check of its tensors to the launch; the planner; "
        "the CUDA sources; the build.",
    ]
    if form == "tf32":
        paragraphs.insert(
            2,
            "TF32 rounds both operands to 10 bits of mantissa, to nearest, as PyTorch's own "
            "convolutions do while torch.backends.cudnn.conv.fp32_precision is 'tf32', its "
            "default. Set to anything else, calls raise an error; this file never sets it.",
        )
    return "\n\n".join(fill(text, 96, break_long_words=False) for text in paragraphs)
