"""Pure Python, no torch: turns any transposed convolution into phases, tap lists and a kernel."""

from .candidate import ATEN, Candidate, Refusal
from .geometry import MOST_PHASES, GradTap, Phase, Tap, grad_taps, output_size, phases
from .plan import KERNELS, Plan, dimension_phases, make_plan
from .problem import DIRECTIONS, ELEMENT_BYTES, H200, Hardware, Problem

__all__ = [
    "ATEN",
    "DIRECTIONS",
    "ELEMENT_BYTES",
    "H200",
    "KERNELS",
    "MOST_PHASES",
    "Candidate",
    "GradTap",
    "Hardware",
    "Phase",
    "Plan",
    "Problem",
    "Refusal",
    "Tap",
    "dimension_phases",
    "grad_taps",
    "make_plan",
    "output_size",
    "phases",
]
