"""Plans of whole problems: the product of dimensions, the choice of a kernel, and no torch."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from upconv.planner import ATEN, H200, KERNELS, Hardware, Plan, Problem, make_plan
from upconv.planner.geometry import output_size

CPU = Hardware("cpu", name="any", threads=2, isa="avx2")
MACHINES = [CPU, replace(CPU, isa="avx512", threads=64), replace(CPU, isa="scalar"), H200]

Place = tuple[int, ...]


def dimensions(
    sizes: int, kernels: int, strides: int, paddings: int, dilations: int
) -> list[Place]:
    """Every (size, kernel, stride, padding, output_padding, dilation) with a positive output."""
    return [
        (size, kernel, stride, padding, output_padding, dilation)
        for size, kernel, stride, padding, dilation in product(
            range(1, sizes + 1),
            range(1, kernels + 1),
            range(1, strides + 1),
            range(paddings + 1),
            range(1, dilations + 1),
        )
        for output_padding in range(max(stride, dilation))
        if output_size(size, kernel, stride, padding, output_padding, dilation) > 0
    ]


def problem_of(combination: tuple[Place, ...]) -> Problem:
    columns = [tuple(column) for column in zip(*combination, strict=True)]
    return Problem(1, 4, 4, *columns)


def brute_force(problem: Problem) -> Counter[tuple[Place, Place, Place]]:
    """(output, tap, input) of every product, straight from the definition in all dimensions."""
    meetings: Counter[tuple[Place, Place, Place]] = Counter()
    for i in product(*map(range, problem.in_size)):
        for k in product(*map(range, problem.kernel)):
            o = tuple(
                a * s - p + b * d
                for a, b, s, p, d in zip(
                    i, k, problem.stride, problem.padding, problem.dilation, strict=True
                )
            )
            if all(0 <= a < size for a, size in zip(o, problem.out_size, strict=True)):
                meetings[o, k, i] += 1
    return meetings


def by_phase_taps(plan: Plan) -> Counter[tuple[Place, Place, Place]]:
    problem = plan.problem
    counts = {
        tuple(phase.first for phase in combination): tuple(phase.count for phase in combination)
        for combination in product(*plan.phases)
    }
    meetings: Counter[tuple[Place, Place, Place]] = Counter()
    for first, taps in plan.phase_taps():
        for q, tap in product(product(*map(range, counts[first])), taps):
            i = tuple(a + t.shift for a, t in zip(q, tap, strict=True))
            if all(0 <= a < size for a, size in zip(i, problem.in_size, strict=True)):
                o = tuple(f + a * s for f, a, s in zip(first, q, problem.stride, strict=True))
                meetings[o, tuple(t.k for t in tap), i] += 1
    return meetings


def by_grad_taps(plan: Plan) -> Counter[tuple[Place, Place, Place]]:
    meetings: Counter[tuple[Place, Place, Place]] = Counter()
    for tap, i in product(plan.grad_taps(), product(*map(range, plan.problem.in_size))):
        phase = [dimension[t.phase] for dimension, t in zip(plan.phases, tap, strict=True)]
        q = [a + t.shift for a, t in zip(i, tap, strict=True)]
        if all(0 <= a < p.count for a, p in zip(q, phase, strict=True)):
            o = tuple(
                p.first + a * s for p, a, s in zip(phase, q, plan.problem.stride, strict=True)
            )
            meetings[o, tuple(t.k for t in tap), i] += 1
    return meetings


SWEEPS = {
    2: list(product(dimensions(2, 3, 3, 1, 2), repeat=2)),
    3: list(product(dimensions(2, 2, 2, 0, 2), repeat=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("ndim", [2, 3])
def test_tap_lists_of_products_are_the_definition(ndim: int) -> None:
    without_taps = 0
    for combination in SWEEPS[ndim]:
        plan = make_plan.__wrapped__(problem_of(combination), CPU)
        expected = brute_force(plan.problem)
        assert by_phase_taps(plan) == expected, plan.problem
        assert by_grad_taps(plan) == expected, plan.problem
        without_taps += any(not taps for _, taps in plan.phase_taps())
    assert len(SWEEPS[ndim]) > 8_000
    assert without_taps > 1_000


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.isa or machine.name)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_every_kernel_is_chosen_or_refused_with_a_reason(machine: Hardware, dtype: str) -> None:
    for combination in SWEEPS[2][::7]:
        plan = make_plan.__wrapped__(replace(problem_of(combination), dtype=dtype), machine)
        refused = {refusal.kernel: refusal.reason for refusal in plan.refused}
        assert plan.kernel not in refused
        assert {plan.kernel, ATEN, *refused} == {ATEN, *KERNELS}
        assert all(reason.strip() for reason in refused.values())


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.isa or machine.name)
def test_shapes_no_kernel_was_tuned_for_still_get_a_plan(machine: Hardware, ndim: int) -> None:
    """Empty batches, prime channels, depthwise, strides beyond the kernel, sizes beyond 2**31."""
    for problem in (
        Problem.of(0, 4, 6, (5,) * ndim, 3),
        Problem.of(3, 7, 13, (11,) * ndim, 3, stride=2, output_padding=1),
        Problem.of(2, 21, 21, (9,) * ndim, 4, stride=2, groups=21, bias=False),
        Problem.of(1, 4, 4, (3,) * ndim, 2, stride=7),
        Problem.of(1, 4, 4, (3,) * ndim, 3, stride=2, dilation=2),
        Problem.of(2**20, 64, 64, (8192,) + (1,) * (ndim - 1), 3),
        Problem.of(1, 1, 1, (1,) * ndim, 1),
        Problem.of(2, 16, 16, (8,) * ndim, 3, channels_last=ndim > 1, dtype="bfloat16"),
    ):
        plan = make_plan(problem, machine)
        assert plan.kernel in {ATEN, *KERNELS}
        assert all(isinstance(value, int) for value in plan.chosen.params)


def test_forcing_pytorch_is_always_possible() -> None:
    problem = Problem.of(4, 64, 64, (32, 32), 4, stride=2, padding=1)
    for machine in MACHINES:
        assert make_plan(problem, machine, ATEN).kernel == ATEN


def test_a_kernel_for_the_other_device_is_refused() -> None:
    problem = Problem.of(4, 64, 64, (32, 32), 4, stride=2, padding=1)
    reasons = {refusal.kernel: refusal.reason for refusal in make_plan(problem, H200).refused}
    assert reasons["cpu_fprop"] == "runs on CPUs only"
    assert "sm90_wgmma_fprop" in {refusal.kernel for refusal in make_plan(problem, CPU).refused}


def test_plans_are_values() -> None:
    """Equal problems give one plan, so it can be a key of a cache and be compared in a test."""
    one, two = (Problem.of(4, 8, 8, (6, 6), 3, stride=2) for _ in range(2))
    assert make_plan(one, CPU) is make_plan(two, CPU)
    assert hash(make_plan(one, CPU)) == hash(make_plan(two, CPU))


def test_floor_numbers_of_a_known_layer() -> None:
    problem = Problem.of(2, 8, 16, (10, 12), (3, 5), stride=(2, 1), padding=1, groups=4)
    assert problem.out_size == ((10 - 1) * 2 - 2 + 2 + 1, (12 - 1) - 2 + 4 + 1)
    assert problem.flops == 2 * 2 * 10 * 12 * 8 * 4 * 15
    assert problem.bytes == 4 * (2 * 8 * 120 + 8 * 4 * 15 + 2 * 16 * 19 * 14 + 16)


def test_the_planner_needs_no_torch() -> None:
    """The folder alone, in an interpreter in which torch cannot be imported."""
    planner = Path(__file__).parent.parent / "upconv" / "planner"
    program = f"""
import sys
sys.modules["torch"] = None
sys.path.insert(0, {str(planner.parent)!r})
from planner import H200, Problem, make_plan
plan = make_plan(Problem.of(2, 8, 8, (6, 6), 4, stride=2, padding=1), H200)
assert len(plan.phase_taps()) == 4
assert not any(name.split(".")[0] in ("torch", "numpy", "upconv") and sys.modules[name]
               for name in sys.modules)
print(plan.kernel)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in {ATEN, *KERNELS}


@pytest.mark.parametrize(
    ("kernel", "direction", "groups", "capability"),
    [
        ("direct_fprop", "forward", 16, (8, 0)),
        ("mma_fprop", "forward", 2, (8, 0)),
        ("mma_fprop", "grad_input", 2, (9, 0)),
    ],
)
def test_a_kernel_on_trial_serves_only_when_it_is_asked_for(
    kernel: str, direction: str, groups: int, capability: tuple[int, int]
) -> None:
    machine = replace(H200, capability=capability, shared_memory=160 * 1024)
    problem = Problem.of(4, 16, 16, (64, 64), 3, groups=groups, tf32=True, direction=direction)
    plan = make_plan(problem, machine)
    assert plan.kernel != kernel
    (reason,) = [refusal.reason for refusal in plan.refused if refusal.kernel == kernel]
    assert f"UPCONV_FORCE_KERNEL={kernel}" in reason
    assert make_plan(problem, machine, kernel).kernel == kernel


def lines_run(problem: Problem) -> int:
    """Lines of Python that a plan takes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        make_plan.__wrapped__(problem, H200)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_work_grows_with_taps_and_strides_and_not_with_their_product(dtype: str) -> None:
    small, large = (Problem.of(1, 1, 1, (50,), n, n, dtype=dtype) for n in (200, 800))
    assert lines_run(large) < 6 * lines_run(small)
