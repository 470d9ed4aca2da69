"""`upconv verify`: drawn configurations on this machine, every result compared with float64.

Each configuration runs by the planner's choice and by every kernel of our own that is legal for it:
forward without recording, then forward and all gradients by autograd. What a result may differ by
is stated by `accuracy.limit`, here as a share of the same sum over absolute values, for each
element: small outputs of sums that cancel are no errors, and no large neighbour hides a wrong one.
"""

from __future__ import annotations

import shlex
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, prod
from random import SystemRandom
from typing import Any

import torch
from torch import Tensor

from . import accuracy, env, libraries, ops
from .configurations import DTYPES, Configuration, draw
from .doctor import cpu_name
from .explain import this_hardware
from .planner import ATEN, KERNELS, Candidate, Problem, Refusal
from .version import __version__

AUTO = "auto"
"""The planner's choice, among the names of kernels."""
FRUITLESS_DRAWS = 300
"""A kernel that none of so many configurations suits will not be met by waiting."""
BEYOND_ROUNDING = 16.0
"""PyTorch's sums in 16 bits exceed the limit, up to 1.5 times; this much is a mistake of its."""
TYPICAL = Problem.of(1, 32, 32, (16, 16), 4, 2, 1)
NAMES = ("output", "gradient of the input", "gradient of the weight", "gradient of the bias")

Tick = Callable[[int], None]
"""Told how many configurations are done, for the counter."""


@dataclass(frozen=True)
class Finding:
    """One result compared. `error` and `limit` are shares of the sum of absolute products."""

    asked: str
    """The kernel asked for, or AUTO; the reproducer asks for it again."""
    kernel: str
    """The one that ran."""
    what: str
    error: float
    limit: float
    detail: str = ""
    """Where it is wrong: the first wrong index, or what was raised."""
    excused: bool = False
    """PyTorch computed it, and is wrong there without upconv as well."""

    @property
    def ratio(self) -> float:
        return self.error / self.limit

    @property
    def wrong(self) -> bool:
        return self.ratio > 1 and not self.excused


@dataclass(frozen=True)
class Mismatch:
    """What a bug report needs."""

    finding: Finding
    reproducer: str


@dataclass
class Report:
    """What was covered, and the mismatch that ended the run, if one did."""

    device: str
    seed: int | None
    """None: one given configuration."""
    configurations: int = 0
    dimensions: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    layouts: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    """Runs by the kernel that ran; a configuration has several."""
    comparisons: int = 0
    closest: dict[str, Finding] = field(default_factory=dict)
    """The largest error relative to its limit: of outputs by kernel, and of gradients."""
    excused: int = 0
    """Comparisons without a verdict, since PyTorch's own result is wrong."""
    seconds: float = 0.0
    interrupted: bool = False
    mismatch: Mismatch | None = None

    def covered(self, problem: Problem, findings: Iterable[Finding]) -> None:
        def count(table: dict[str, int], name: str) -> None:
            table[name] = table.get(name, 0) + 1

        self.configurations += 1
        count(self.dimensions, f"{problem.ndim}-D")
        count(self.dtypes, problem.dtype)
        count(self.layouts, "channels_last" if problem.channels_last else "contiguous")
        for finding in findings:
            self.comparisons += 1
            if finding.what == NAMES[0]:
                count(self.kernels, finding.kernel)
            if finding.excused:
                self.excused += 1
                continue
            name = finding.kernel if finding.what.startswith(NAMES[0]) else "gradients"
            before = self.closest.get(name, finding)
            self.closest[name] = max(before, finding, key=lambda found: found.ratio)

    def as_dict(self) -> dict[str, Any]:
        record: dict[str, Any] = _finite(asdict(self))
        return record | {"environment": environment(self.device)}

    def __str__(self) -> str:
        count = f"{self.configurations} configuration{'s' * (self.configurations != 1)}"
        place = f"{self.seconds:.1f} s on {environment(self.device)['name']}"
        seed = "" if self.seed is None else f", seed {self.seed}"
        outcome = "no mismatch" if self.mismatch is None else "then a mismatch"
        stopped = ", interrupted" if self.interrupted else ""
        lines = [
            f"{count}, {self.comparisons} comparisons in {place}{seed}: {outcome}{stopped}",
        ]
        for title in ("dimensions", "dtypes", "layouts", "kernels"):
            counts = sorted(getattr(self, title).items())
            text = ", ".join(f"{name} {times}" for name, times in counts) or "none"
            lines.append(f"{title:<12}{text}")
        worst = [f"{name} {found.ratio:.2f}" for name, found in sorted(self.closest.items())]
        if worst:
            lines.append(f"{'errors':<12}{', '.join(worst)} of the limit, at most")
        if self.excused:
            lines.append(
                f"{'note':<12}{self.excused} left out: PyTorch's own result is wrong there"
            )
        if self.seed is not None and self.kernels and not self.kernels.keys() - {ATEN}:
            lines.append(f"{'note':<12}no kernel of upconv's ran: `upconv doctor` says why")
        if self.mismatch is not None:
            lines += mismatch_lines(self.mismatch)
        return "\n".join(lines)


def mismatch_lines(mismatch: Mismatch) -> list[str]:
    finding = mismatch.finding
    return [
        "",
        f"MISMATCH: {finding.what}, kernel {finding.kernel}: "
        f"error {finding.error:.3g}, limit {finding.limit:.3g}",
        finding.detail,
        "Please report this with the output of `upconv doctor --json`. To see it again:",
        mismatch.reproducer,
    ]


def _finite(value: Any) -> Any:
    """JSON knows no infinity: an error without bound is written as null."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def environment(device: str) -> dict[str, Any]:
    machine = this_hardware(device)
    name = cpu_name() if machine.kind == "cpu" else machine.name
    return {
        "upconv": __version__,
        "torch": torch.__version__,
        "name": name,
        "threads": torch.get_num_threads(),
        "isa": machine.isa,
    }


def reproducer(configuration: Configuration, device: str, asked: str) -> str:
    """One line for a shell, the UPCONV_* variables that decide what runs included."""
    names = ("UPCONV_BACKEND", "UPCONV_FORCE_KERNEL", "UPCONV_ISA")
    known = [each for each in env.variables() if each.name in names and each.is_set]
    variables = [f"{each.name}={shlex.quote(each.value)}" for each in known]
    words = ["upconv", "verify", "--problem", configuration.compact(), "--kernel", asked]
    return " ".join([*variables, *map(shlex.quote, [*words, "--device", device])])


def kernels_asked(name: str | None) -> tuple[str, ...]:
    """What --kernel stands for; without it, the planner's choice and every kernel of our own."""
    known = (AUTO, ATEN, *KERNELS)
    if name is not None and name not in known:
        raise ValueError(f"--kernel: there is no {name!r}; choose from {', '.join(known)}")
    return (AUTO, *KERNELS) if name is None else (name,)


def build_ahead(device: str) -> None:
    """So that compiling does not use up the time given for checking."""
    machine = this_hardware(device)
    if env.settings().backend != "aten" and any(
        isinstance(consider(replace(TYPICAL, tf32=device == "cuda"), machine), Candidate)
        for consider in KERNELS.values()
    ):
        for kind in libraries.of_device(device):
            ops.serve(kind)


def kernel_of(problem: Problem, inputs: accuracy.Inputs) -> str:
    """The kernel that a call runs by now, as the operators decide it."""
    plan = ops.planned(problem.ndim, inputs.x, inputs.weight, inputs.bias, *inputs.options)
    if plan is None or plan.kernel == ATEN:
        return ATEN
    needed = libraries.needed_for(inputs.x.device.type, plan.kernel, plan.problem)
    return plan.kernel if all(map(ops.serve, needed)) else ATEN


def here(problem: Problem, device: str) -> Problem:
    """The problem as this machine takes it: float32 by TF32 where PyTorch is allowed to."""
    tf32 = device == "cuda" and problem.dtype == "float32" and ops.tf32_allowed()
    return replace(problem, tf32=tf32)


def check(configuration: Configuration, device: str, asked: Sequence[str]) -> Iterator[Finding]:
    """Every comparison of a configuration, by each kernel asked for that is legal."""
    problem = here(configuration.problem, device)
    inputs = accuracy.make_inputs(problem, device, configuration.seed)
    shape = (problem.batch, problem.out_channels, *problem.out_size)
    generator = torch.Generator(device).manual_seed(configuration.seed + 1)
    grad_output = torch.randn(shape, generator=generator, device=device).to(inputs.x.dtype)
    comparison: Comparison | None = None
    for name in asked:
        with ops.forced(None if name == AUTO else name):
            kernel = kernel_of(problem, inputs)
            if name not in (AUTO, kernel):
                continue
            comparison = comparison or Comparison(problem, inputs, grad_output)
            findings = compared(comparison, name, kernel)
        yield from findings


def compared(comparison: Comparison, asked: str, kernel: str) -> list[Finding]:
    """The public function without recording, then the operator with all gradients.

    The operator, because the function leaves calls as small as these to PyTorch when they record.
    """
    problem, inputs, grad_output = comparison.problem, comparison.inputs, comparison.grad_output
    memory = (grad_output.shape, grad_output.dtype, grad_output.device)
    try:
        poison(*memory)
        with torch.no_grad():
            output = inputs.run(accuracy.upconv_operator(problem.ndim))
        poison(*memory)
        operator = ops.FORWARD[problem.ndim - 1]
        recorded = differentiated(operator, inputs, grad_output, torch.Tensor.detach)
    except Exception as error:  # PyTorch computed it: whatever ours raises is a mismatch
        words = f"raised {type(error).__name__}: {error}"
        limit = comparison.limits[NAMES[0]]
        return [Finding(asked, kernel, NAMES[0], float("inf"), limit, words)]
    findings = [
        comparison.finding(asked, kernel, what, result)
        for what, result in [(NAMES[0], output), *recorded.items()]
    ]
    findings[1] = replace(findings[1], what=f"{NAMES[0]} with gradients recorded")
    return findings


def poison(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Leaves NaNs in the memory that the next allocation of this size will get.

    On the CPU one block of just this size is met 8 times in 10 by the next allocation, eight
    blocks with room for its alignment 19 times in 20.
    """
    count = prod(shape) + 32
    blocks = [torch.full((count,), float("nan"), dtype=dtype, device=device) for _ in range(8)]
    if device.type == "cuda":  # hands blocks of the same size out again
        blocks.append(torch.full(tuple(shape), float("nan"), dtype=dtype, device=device))


def differentiated(
    operator: accuracy.Operator,
    inputs: accuracy.Inputs,
    grad_output: Tensor,
    prepare: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Output and every gradient, of operands that `prepare` made."""
    operands = [
        None if tensor is None else prepare(tensor.detach()).requires_grad_()
        for tensor in (inputs.x, inputs.weight, inputs.bias)
    ]
    output = operator(*operands, *inputs.options)
    wanted = [tensor for tensor in operands if tensor is not None]
    gradients = torch.autograd.grad(output, wanted, prepare(grad_output))
    return dict(zip(NAMES, (output.detach(), *gradients), strict=False))


class Comparison:
    """The exact results of a problem, the sums that bound rounding, and the limits."""

    def __init__(self, problem: Problem, inputs: accuracy.Inputs, grad_output: Tensor) -> None:
        self.problem, self.inputs, self.grad_output = problem, inputs, grad_output
        self.exact = self._by_torch(torch.Tensor.double)
        self.scale = self._by_torch(lambda tensor: tensor.double().abs())
        pixels = problem.batch * prod(problem.in_size)
        per_pixel = problem.out_channels // problem.groups * prod(problem.kernel)
        products = (None, per_pixel, pixels, problem.batch * prod(problem.out_size))
        self.limits = {
            what: accuracy.limit(problem, count)
            for what, count in zip(NAMES, products, strict=True)
        }

    def _by_torch(self, prepare: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        operator = accuracy.TORCH_OPERATORS[self.problem.ndim]
        return differentiated(operator, self.inputs, self.grad_output, prepare)

    def finding(self, asked: str, kernel: str, what: str, result: Tensor) -> Finding:
        """Where PyTorch computed it, twice PyTorch's own error is within the limit too."""
        exact, limit = self.exact[what], self.limits[what]
        dtype = self.inputs.x.dtype
        if result.shape != exact.shape or result.dtype != dtype:
            words = f"{tuple(result.shape)} of {result.dtype}, not {tuple(exact.shape)} of {dtype}"
            return Finding(asked, kernel, what, float("inf"), limit, words)
        ratios = self._ratios(what, result)
        worst = float(ratios.max())
        if worst > 1 and (kernel == ATEN or what != NAMES[0]):
            own = self._own_ratio(what)
            if own > BEYOND_ROUNDING:
                return Finding(asked, kernel, what, worst * limit, limit, excused=True)
            allowed = max(1.0, 2 * own)
            ratios, limit, worst = ratios / allowed, limit * allowed, worst / allowed
        if worst <= 1:
            return Finding(asked, kernel, what, worst * limit, limit)
        index = tuple((ratios > 1).nonzero()[0].tolist())
        detail = (
            f"{int((ratios > 1).sum())} of {ratios.numel()} wrong, first at {list(index)}: "
            f"{float(result[index]):.9g}, not {float(exact[index]):.9g}"
        )
        return Finding(asked, kernel, what, worst * limit, limit, detail)

    def _own_ratio(self, what: str) -> float:
        """PyTorch's largest error relative to the limit, over a few calls in poisoned memory.

        PyTorch 2.13 reads memory it never wrote, now and then, in the weight gradients of 3-D
        bfloat16 channels_last calls on the CPU: 4 of 1200 drawn ones are wrong by any measure.
        """
        worst, exact = 0.0, self.exact[what]
        for _ in range(4):
            for dtype in (self.inputs.x.dtype, torch.float32):
                poison(exact.shape, dtype, exact.device)
            theirs = self._by_torch(torch.Tensor.detach)[what]
            worst = max(worst, float(self._ratios(what, theirs).max()))
        return worst

    def _ratios(self, what: str, result: Tensor) -> Tensor:
        """Each element's error relative to its limit; infinite where it is not a number.

        Below the smallest normal number of its dtype a result may be rounded to zero.
        """
        gap = (result.double() - self.exact[what]).abs()
        smallest = torch.finfo(result.dtype).smallest_normal
        ratios = gap / (self.limits[what] * self.scale[what] + smallest)
        return ratios.nan_to_num(nan=float("inf"), posinf=float("inf"))


def verify(
    configurations: Iterable[Configuration],
    report: Report,
    kernel: str | None = None,
    seconds: float = float("inf"),
    tick: Tick = lambda done: None,
) -> Report:
    """Check until the time is up, the configurations end, one is wrong, or the user stops it."""
    asked = kernels_asked(kernel)
    start = time.monotonic()
    try:
        build_ahead(report.device)
        start = time.monotonic()
        for tried, configuration in enumerate(configurations, 1):
            findings = list(check(configuration, report.device, asked))
            wrong = next((found for found in findings if found.wrong), None)
            if wrong is not None:
                line = reproducer(configuration, report.device, wrong.asked)
                report.mismatch = Mismatch(wrong, line)
                break
            if findings:
                report.covered(configuration.problem, findings)
                tick(report.configurations)
            elif report.seed is None or (tried >= FRUITLESS_DRAWS and not report.configurations):
                raise ValueError(_unsuited(configuration.problem, report.device, asked[0]))
            if time.monotonic() - start >= seconds:
                break
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = round(time.monotonic() - start, 3)
    return report


def _unsuited(problem: Problem, device: str, kernel: str) -> str:
    answer = KERNELS[kernel](here(problem, device), this_hardware(device))
    reason = (
        answer.reason
        if isinstance(answer, Refusal)
        else "its library is not in use; `upconv doctor` says why"
    )
    return f"--kernel {kernel} cannot serve this on --device {device}: {reason}"


def with_counter(
    configurations: Iterable[Configuration], report: Report, kernel: str | None, seconds: float
) -> Report:
    """`verify` with a counter on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("starting", total=seconds if isfinite(seconds) else None)

        def tick(done: int) -> None:
            text = f"{done} configurations, seed {report.seed}"
            elapsed = progress.tasks[task].elapsed or 0.0
            progress.update(task, description=text, completed=elapsed)

        return verify(configurations, report, kernel, seconds, tick)


def command(options: Namespace) -> Report:
    """The run that the options of `upconv verify` ask for; ValueError where they make no sense."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA GPU here; `upconv doctor` says more")
    if options.problem is not None:
        given = [
            name for name in ("seconds", "seed", "dtype") if getattr(options, name) is not None
        ]
        if given:
            raise ValueError(f"--problem says it all: leave --{given[0]} out")
        one = Configuration.parse(options.problem)
        return with_counter([one], Report(device, None), options.kernel, float("inf"))
    seconds = 30.0 if options.seconds is None else options.seconds
    if not seconds > 0:
        raise ValueError(f"--seconds must be more than 0, got {seconds:g}")
    seed = SystemRandom().getrandbits(31) if options.seed is None else options.seed
    dtypes = DTYPES if options.dtype is None else (options.dtype,)
    return with_counter(draw(seed, dtypes), Report(device, seed), options.kernel, seconds)
