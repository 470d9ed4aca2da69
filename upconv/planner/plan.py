"""Problem in, Plan out: ask every kernel, keep the refusals, take the fastest of what is left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf

from . import (
    cpu,
    cuda_aten,
    depthwise_igrad,
    depthwise_wgrad,
    direct,
    direct_igrad,
    direct_wgrad,
    gather_igrad,
    gather_wgrad,
    mma,
    overlap,
    sm90,
    sm90_patch,
    sm90_patch_wgrad,
    sm90_phases,
    sm90_phases_wgrad,
    sm90_walk,
    sm90_wgrad,
)
from .candidate import ATEN, Candidate, Refusal
from .geometry import GradTap, Phase, Tap, grad_taps, phases
from .problem import Hardware, Problem

KERNELS = {
    cpu.KERNEL: cpu.consider,
    sm90.KERNEL: sm90.consider,
    sm90_patch.KERNEL: sm90_patch.consider,
    sm90_phases.KERNEL: sm90_phases.consider,
    sm90_walk.KERNEL: sm90_walk.consider,
    direct.KERNEL: direct.consider,
    mma.KERNEL: mma.consider,
    overlap.KERNEL: overlap.consider,
    sm90_wgrad.KERNEL: sm90_wgrad.consider,
    sm90_patch_wgrad.KERNEL: sm90_patch_wgrad.consider,
    sm90_phases_wgrad.KERNEL: sm90_phases_wgrad.consider,
    direct_wgrad.KERNEL: direct_wgrad.consider,
    direct_igrad.KERNEL: direct_igrad.consider,
    gather_wgrad.KERNEL: gather_wgrad.consider,
    gather_igrad.KERNEL: gather_igrad.consider,
    depthwise_wgrad.KERNEL: depthwise_wgrad.consider,
    depthwise_igrad.KERNEL: depthwise_igrad.consider,
}
"""Every kernel of our own, by name. Each `consider` answers with a Candidate or a Refusal."""

SERVED = {
    cpu.KERNEL: ("forward",),
    sm90.KERNEL: ("forward", "grad_input"),
    sm90_patch.KERNEL: ("forward", "grad_input"),
    sm90_phases.KERNEL: ("forward", "grad_input"),
    sm90_walk.KERNEL: ("forward", "grad_input"),
    direct.KERNEL: ("forward", "grad_input"),
    mma.KERNEL: ("forward", "grad_input"),
    overlap.KERNEL: ("forward",),
    sm90_wgrad.KERNEL: ("grad_weight",),
    sm90_patch_wgrad.KERNEL: ("grad_weight",),
    sm90_phases_wgrad.KERNEL: ("grad_weight",),
    direct_wgrad.KERNEL: ("grad_weight",),
    direct_igrad.KERNEL: ("grad_input",),
    gather_wgrad.KERNEL: ("grad_weight",),
    gather_igrad.KERNEL: ("grad_input",),
    depthwise_wgrad.KERNEL: ("grad_weight",),
    depthwise_igrad.KERNEL: ("grad_input",),
}
"""The directions that each kernel computes."""

PROVEN = {
    (sm90.KERNEL, "forward"): ((9, 0),),
    (sm90.KERNEL, "grad_input"): ((9, 0),),
    (sm90_patch.KERNEL, "forward"): ((9, 0),),
    (sm90_patch.KERNEL, "grad_input"): ((9, 0),),
    (sm90_phases.KERNEL, "forward"): ((9, 0),),
    (sm90_phases.KERNEL, "grad_input"): ((9, 0),),
    (sm90_walk.KERNEL, "forward"): ((9, 0),),
    (sm90_walk.KERNEL, "grad_input"): ((9, 0),),
    (sm90_wgrad.KERNEL, "grad_weight"): ((9, 0),),
    (sm90_patch_wgrad.KERNEL, "grad_weight"): ((9, 0),),
    (sm90_phases_wgrad.KERNEL, "grad_weight"): ((9, 0),),
    (direct.KERNEL, "forward"): ((9, 0),),
    (direct.KERNEL, "grad_input"): ((9, 0),),
    (direct_wgrad.KERNEL, "grad_weight"): ((9, 0),),
    (direct_igrad.KERNEL, "grad_input"): ((9, 0),),
    (gather_wgrad.KERNEL, "grad_weight"): ((9, 0),),
    (gather_igrad.KERNEL, "grad_input"): ((9, 0),),
    (depthwise_wgrad.KERNEL, "grad_weight"): ((9, 0),),
    (depthwise_igrad.KERNEL, "grad_input"): ((9, 0),),
    (mma.KERNEL, "forward"): ((9, 0),),
    (overlap.KERNEL, "forward"): ((9, 0),),
}
"""GPU kernels, by direction, and the compute capabilities on which they serve by themselves: there
their tests passed on a GPU, in this form or in one from which it differs by what the CPU tests
cover (docs/notes tells what ran when). Elsewhere they are on trial and serve only where they are
asked for by name, as one that is not here at all does everywhere."""


def on_trial(kernel: str, direction: str, hardware: Hardware) -> bool:
    if hardware.kind != "cuda" or kernel == cpu.KERNEL:  # which refuses GPUs by itself
        return False
    return hardware.capability not in PROVEN.get((kernel, direction), ())


MARGIN = {"cpu": 1.05, "cuda": 1.0}
"""A kernel of our own must promise at least this gain. Of 1,394 measured calls of 246 layers
PyTorch keeps 85 in which ours is more than 5 % faster, with 1.05 it kept 120; ours is chosen in 37
in which it is more than 5 % slower, with 1.05 in 32."""


@dataclass(frozen=True)
class Plan:
    problem: Problem
    hardware: Hardware
    phases: tuple[tuple[Phase, ...], ...]
    """Per spatial dimension, in order; the phases of the problem are their product."""
    chosen: Candidate
    refused: tuple[Refusal, ...]

    @property
    def kernel(self) -> str:
        return self.chosen.kernel

    @property
    def saved_microseconds(self) -> float:
        """How much longer PyTorch's own operator is expected to take."""
        return _aten(self.problem, self.hardware).microseconds - self.chosen.microseconds

    def phase_taps(self) -> list[tuple[tuple[int, ...], list[tuple[Tap, ...]]]]:
        """Every phase of the problem: its first output position, and its taps."""
        return [
            (
                tuple(phase.first for phase in combination),
                list(product(*(phase.taps for phase in combination))),
            )
            for combination in product(*self.phases)
        ]

    def grad_taps(self) -> list[tuple[GradTap, ...]]:
        """Every tap of the problem as the gradients read it, one `GradTap` per dimension."""
        return list(product(*(grad_taps(dimension) for dimension in self.phases)))


def dimension_phases(problem: Problem) -> tuple[tuple[Phase, ...], ...]:
    return tuple(phases(*dimension) for dimension in problem.dimensions)


CORE_FLOPS = 2 * 128 * 2.0e9
"""Of a multiprocessor without tensor cores, in a second: two a cycle for each of 128 cores."""
GATHER_FLOPS = {"float32": 0.7e12, "bfloat16": 1.2e12, "float16": 1.2e12}
"""Of a multiprocessor by the gather kernels, with many channels: 0.5 and 0.8e12 at best over 20
layers, since single elements are gathered from shared memory."""


def _most_flops(kernel: str, problem: Problem) -> float:
    """Of a multiprocessor, in a second, for kernels that few layers suit; else infinite."""
    if kernel == direct.KERNEL:
        return CORE_FLOPS
    if kernel in (gather_wgrad.KERNEL, gather_igrad.KERNEL):
        return GATHER_FLOPS.get(problem.dtype, inf)
    return inf


def _hopeless(kernel: str, problem: Problem, hardware: Hardware) -> str:
    """Why a kernel need not be looked at: its tilings take as long as those of all others."""
    most = _most_flops(kernel, problem)
    if most == inf or hardware.kind != "cuda":
        return ""
    least = problem.flops / most / hardware.multiprocessors * 1e6
    aten = _aten(problem, hardware).microseconds
    if least < aten:
        return ""
    return f"slower here: {least:.1f} us at the very least, {aten:.1f} us expected with {ATEN}"


SUPERSEDED = {sm90.KERNEL: sm90_patch, sm90_wgrad.KERNEL: sm90_patch_wgrad}
"""Kernels for all layers, and those for patches, which were faster wherever they may serve: 1.0 to
3.8 times in 267 calls of 28 layers (docs/notes/2026-11-16-patches.md)."""


def _superseded(kernel: str, problem: Problem, hardware: Hardware) -> str:
    """The kernel that is faster wherever it may serve, as here; else an empty text."""
    other = SUPERSEDED.get(kernel)
    if other is None or on_trial(other.KERNEL, problem.direction, hardware):
        return ""
    return "" if other.refusal(problem, hardware) else other.KERNEL


def _answer(
    kernel: str, problem: Problem, hardware: Hardware, forced: str | None
) -> Candidate | Refusal:
    served = SERVED[kernel]
    if problem.direction not in served:
        return Refusal(kernel, f"computes {' and '.join(served)}, not {problem.direction}")
    if kernel != forced and on_trial(kernel, problem.direction, hardware):
        # Without a look at its tilings, which would take up to 60 ms for a layer.
        return Refusal(
            kernel,
            "on trial: its present form has yet to pass its tests on such a GPU; serves only where"
            f" UPCONV_FORCE_KERNEL={kernel} asks for it",
        )
    if kernel != forced and (reason := _hopeless(kernel, problem, hardware)):
        return Refusal(kernel, reason)
    if kernel != forced and (other := _superseded(kernel, problem, hardware)):
        return Refusal(kernel, f"slower than {other} on all layers that have been measured")
    answer = KERNELS[kernel](problem, hardware)
    if isinstance(answer, Candidate):
        answer = _with_bias_pass(answer, problem)
    return answer


def _aten(problem: Problem, hardware: Hardware) -> Candidate:
    """PyTorch's own operator: always legal."""
    if hardware.kind == "cpu":
        if problem.direction != "forward":  # nothing to compare it with
            return Candidate(ATEN, inf, notes=("PyTorch's own convolution",))
        estimate = cpu.aten_microseconds(problem, hardware)
        return Candidate(ATEN, estimate, notes=(cpu.aten_note(problem),))
    estimate = cuda_aten.aten_microseconds(problem)
    answer = Candidate(ATEN, estimate, notes=(cuda_aten.aten_note(problem),))
    return _with_bias_pass(answer, problem)


def _with_bias_pass(candidate: Candidate, problem: Problem) -> Candidate:
    """The weight's gradient, where the bias's is wanted too and does not come with it."""
    if problem.direction != "grad_weight" or not problem.bias or candidate.with_bias:
        return candidate
    more = cuda_aten.bias_microseconds(problem)
    return replace(candidate, microseconds=candidate.microseconds + more)


def _expected(candidate: Candidate, hardware: Hardware) -> float:
    margin = 1.0 if candidate.kernel == ATEN else MARGIN.get(hardware.kind, 1.0)
    return candidate.microseconds * margin


@lru_cache(maxsize=4096)
def make_plan(problem: Problem, hardware: Hardware, forced: str | None = None) -> Plan:
    """The plan for a problem on a machine.

    `forced` names the kernel to use wherever it is legal, whatever it costs: for tests and for
    measurements.
    """
    answers = [_answer(kernel, problem, hardware, forced) for kernel in KERNELS]
    refused = [answer for answer in answers if isinstance(answer, Refusal)]
    legal = [answer for answer in answers if isinstance(answer, Candidate)]
    aten = _aten(problem, hardware)
    wanted = [c for c in [*legal, aten] if c.kernel == forced] or [*legal, aten]
    chosen = min(wanted, key=lambda candidate: _expected(candidate, hardware))
    refused += [
        Refusal(
            other.kernel,
            f"slower here: {other.microseconds:.1f} us expected,"
            f" {chosen.microseconds:.1f} us with {chosen.kernel}",
        )
        for other in legal
        if other is not chosen
    ]
    return Plan(problem, hardware, dimension_phases(problem), chosen, tuple(refused))
