"""`upconv bench`: checks, then times, the same inputs through PyTorch and through upconv.

A row is checked against float64 before anything is timed, and a wrong row is never timed. The
contenders take turns, so that a machine that slows down slows both; medians are reported with the
quartiles beside them, and with the floor that this machine's own rates set.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, isfinite, log
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import accuracy, floor, gradients, libraries, stopwatch
from .cases import Case
from .contenders import Contender, bound, contender, peers
from .doctor import cpu_name
from .explain import explanation_of, this_hardware
from .floor import Rates
from .jit import load
from .planner import ATEN, Plan, Problem
from .stopwatch import Timing
from .version import __version__

SCHEMA = 3
"""2 added `skipped`, `scratch`, `rates` and contenders other than "torch" and "upconv"; 3 the
floor, gradients, and rows of several dtypes, layouts and directions in one file."""
CPU_CALL_LIMIT_S = 1.0
"""One PyTorch call on the CPU may take this long; the batch is cut until it does."""

Say = Callable[[str], None]
"""Told what is going on, for the progress bar."""


class Kind(NamedTuple):
    """What rows must have in common to stand in one table."""

    dtype: str
    """A dtype of torch's, or "tf32": float32 tensors multiplied so."""
    layout: str
    direction: str

    def __str__(self) -> str:
        return ", ".join(self)


@dataclass(frozen=True)
class Row:
    """One case measured. `times` is empty where the result was wrong or the case failed."""

    case: str
    problem: Problem
    full_batch: int
    kernel: str
    reason: str = ""
    """Why PyTorch's own operator was taken, where it was."""
    direction: str = "forward"
    errors: dict[str, float] = field(default_factory=dict)
    """Of each contender; backward the largest of its gradients'."""
    limit: float = 0.0
    times: dict[str, Timing] = field(default_factory=dict)
    failure: str = ""
    skipped: dict[str, str] = field(default_factory=dict)
    """Contenders that were asked for and not timed, and why."""
    scratch: dict[str, int] = field(default_factory=dict)
    """GPU: bytes that a call allocated beside its inputs and its results, at the peak."""
    gradients: dict[str, dict[str, float]] = field(default_factory=dict)
    """Backward: the error of each contender's gradient of "input", "weight" and "bias"."""
    limits: dict[str, float] = field(default_factory=dict)
    """Backward: what each of these gradients may be wrong by."""
    floor_ms: float | None = None
    """No implementation is faster on this machine; None where its rates were not measured."""

    @property
    def kind(self) -> Kind:
        problem = self.problem
        tf32 = problem.tf32 and problem.dtype == "float32"
        layout = "channels_last" if problem.channels_last else "contiguous"
        return Kind("tf32" if tf32 else problem.dtype, layout, self.direction)

    def wrong(self, name: str) -> str:
        """How a contender's result is wrong; empty where rounding explains its error."""
        if self.direction == "forward":
            found = {"": (self.errors.get(name, float("inf")), self.limit)}
        else:
            own = self.gradients.get(name, {})
            found = {
                f" in the gradient of the {part}": (own.get(part, float("inf")), limit)
                for part, limit in self.limits.items()
            }
        words = [
            f"error {error:.1e} > {limit:.1e}{where}"
            for where, (error, limit) in found.items()
            if not error <= limit
        ]
        return "; ".join(words)

    @property
    def correct(self) -> bool:
        return not self.failure and "upconv" in self.errors and not self.wrong("upconv")

    @property
    def by_pytorch(self) -> bool:
        """upconv's time is that of PyTorch's own operator."""
        return self.kernel == ATEN

    @property
    def partly_by_pytorch(self) -> bool:
        """Backward: one of the gradients is PyTorch's."""
        return not self.by_pytorch and ATEN in self.kernel.split(" + ")

    def speed_up(self, name: str) -> float | None:
        """How many times faster than that contender."""
        if name not in self.times or "upconv" not in self.times:
            return None
        return self.times[name].median / self.times["upconv"].median

    @property
    def ratio(self) -> float | None:
        """How many times faster than the fastest of the others."""
        others = [timing.median for name, timing in self.times.items() if name != "upconv"]
        if not others or "upconv" not in self.times:
            return None
        return min(others) / self.times["upconv"].median

    @property
    def rates(self) -> dict[str, dict[str, float]]:
        """Speed of each contender: work and least traffic of the problem by its median time."""
        passes = floor.passes(self.direction)
        flops, traffic = passes * self.problem.flops / 1e9, passes * self.problem.bytes / 1e9
        return {
            name: {"tflop_per_s": flops / timing.median, "tb_per_s": traffic / timing.median}
            for name, timing in self.times.items()
        }

    @property
    def share_of_floor(self) -> dict[str, float]:
        """Floor by time: 1 is as fast as the machine can."""
        if self.floor_ms is None:
            return {}
        return {name: self.floor_ms / timing.median for name, timing in self.times.items()}

    def as_dict(self) -> dict[str, Any]:
        # JSON knows no infinity: an error without bound is written as null.
        finite = {
            "errors": _finite(self.errors),
            "gradients": {name: _finite(parts) for name, parts in self.gradients.items()},
        }
        derived = {
            "correct": self.correct,
            "ratio": self.ratio,
            "rates": self.rates,
            "share_of_floor": self.share_of_floor,
        }
        return asdict(self) | finite | derived

    @staticmethod
    def from_dict(record: dict[str, Any]) -> Row:
        sizes: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in record["problem"].items()
        }
        # Files of older schemas lack the newer fields.
        known = {name: record[name] for name in Row.__dataclass_fields__ if name in record}
        known["problem"] = Problem(**sizes)
        known["errors"] = _unbounded(record["errors"])
        gradients_of = record.get("gradients", {})
        known["gradients"] = {name: _unbounded(parts) for name, parts in gradients_of.items()}
        known["times"] = {name: Timing(**timing) for name, timing in record["times"].items()}
        return Row(**known)


def _finite(found: dict[str, float]) -> dict[str, float | None]:
    return {name: error if isfinite(error) else None for name, error in found.items()}


def _unbounded(found: dict[str, float | None]) -> dict[str, float]:
    return {name: float("inf") if error is None else error for name, error in found.items()}


@dataclass(frozen=True)
class Settings:
    """How to measure a case: "cpu" or "cuda", dtype, layout and direction, seconds."""

    device: str = "cpu"
    dtype: str = "float32"
    """On a GPU "float32" is strict and "tf32" is PyTorch's default."""
    layout: str = "contiguous"
    seconds: float = 4.0
    """Time spent on the timed calls of one case, about."""
    against: tuple[str, ...] = ("default",)
    """Ways of calling PyTorch, as `--against` names them."""
    direction: str = "forward"
    commit: str | None = None
    """Of what is measured, where git cannot tell: in a copy without its history."""


def summary(rows: list[Row]) -> dict[str, Any]:
    """Geometric mean and worst of the ratios; None where nothing was timed."""
    ratios = [(row.ratio, row.case) for row in rows if row.ratio is not None]
    if not ratios:
        return {"geometric_mean": None, "worst": None, "worst_case": None, "cases": 0}
    worst, worst_case = min(ratios)
    return {
        "geometric_mean": exp(sum(log(ratio) for ratio, _ in ratios) / len(ratios)),
        "worst": worst,
        "worst_case": worst_case,
        "cases": len(ratios),
    }


def by_kind(rows: list[Row]) -> dict[Kind, list[Row]]:
    """The rows that stand in one table, table by table."""
    found: dict[Kind, list[Row]] = {}
    for row in rows:
        found.setdefault(row.kind, []).append(row)
    return found


def load_average() -> float:
    """Processes that want a core, of the last minute; ask before measuring, not after."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def commit() -> str | None:
    """The commit of this checkout, "+" added where files were changed since; None elsewhere."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def environment(settings: Settings) -> dict[str, Any]:
    """What a reader must know to compare two result files."""
    device = settings.device
    machine = this_hardware(device)
    return {
        "upconv": __version__,
        "commit": settings.commit or commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device == "cuda" else None,
        "python": platform.python_version(),
        "hardware": asdict(machine) | ({"name": cpu_name()} if machine.kind == "cpu" else {}),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def report(
    rows: list[Row],
    settings: Settings,
    complete: bool = True,
    load: float = 0.0,
    rates: dict[str, Rates] | None = None,
) -> dict[str, Any]:
    """The result file. `load` is the load average before the first case; rates go by dtype.

    Of the settings only what all rows share is kept: the rows say the rest themselves.
    """
    shared = {name: getattr(settings, name) for name in ("device", "seconds", "against")}
    kinds = by_kind(rows)
    return {
        "schema": SCHEMA,
        "environment": environment(settings) | {"load_before": round(load, 2)},
        "settings": shared,
        "machine_rates": {dtype: asdict(found) for dtype, found in (rates or {}).items()},
        "complete": complete,
        "summary": summary(rows),
        "summaries": [kind._asdict() | summary(some) for kind, some in kinds.items()],
        "rows": [row.as_dict() for row in rows],
    }


def problem_of(case: Case, settings: Settings) -> Problem:
    """The case at its full batch, as these settings run it."""
    return case.problem(
        dtype="float32" if settings.dtype == "tf32" else settings.dtype,
        channels_last=settings.layout == "channels_last",
        tf32=settings.dtype == "tf32",
    )


def measure(
    case: Case, settings: Settings, say: Say = lambda stage: None, rates: Rates | None = None
) -> Row:
    """Fit, check and time one case. What goes wrong is in the row, not raised."""
    problem = problem_of(case, settings)
    row = Row(case.name, problem, case.batch, kernel="?", direction=settings.direction)
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            floor.precision(settings.device, settings.dtype, "conv"),
        ):
            if settings.device == "cpu":
                say("fitting the batch")
                row = replace(row, problem=fit_batch(problem, settings.direction))
            if rates is not None:
                row = replace(row, floor_ms=rates.floor_ms(row.problem, row.direction))
            return checked_and_timed(row, settings, say)
    except (RuntimeError, MemoryError) as error:
        return replace(row, failure=in_words(error))


def in_words(error: Exception) -> str:
    """One line: what kind of error, and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def grad_output_for(problem: Problem, device: str, direction: str) -> Tensor | None:
    return gradients.make_grad_output(problem, device) if direction == "backward" else None


def checked_and_timed(row: Row, settings: Settings, say: Say) -> Row:
    problem, device = row.problem, settings.device
    inputs = accuracy.make_inputs(problem, device)
    grad_output = grad_output_for(problem, device, row.direction)
    explanation = explanation_of(problem, this_hardware(device), here=True)
    needed = libraries.needed_for(device, explanation.plan.kernel, problem)
    missing = next((library for library in map(load, needed) if not library.ok), None)
    # Anew: what stood in the way before the build may be gone.
    explanation = explanation_of(problem, this_hardware(device), here=True)
    say("checking against float64")
    names, skipped = peers(settings.against, problem, device)
    contenders, results = first_results([*names, "upconv"], inputs, problem, skipped, grad_output)
    row = replace(
        with_errors(row, inputs, grad_output, results),
        kernel=ATEN if missing else explanation.kernel,
        reason=missing.reason if missing else "; ".join(explanation.refused.values()),
        skipped=skipped,
    )
    results.clear()
    if row.correct:
        for name in [name for name in contenders if row.wrong(name)]:
            skipped[name] = f"wrong: {row.wrong(name)}"
            del contenders[name]
        say("timing")
        times = stopwatch.timed(contenders, settings.seconds, device)
        on_gpu = contenders if device == "cuda" else {}
        scratch = {name: one.do(stopwatch.scratch_bytes) for name, one in on_gpu.items()}
        row = replace(row, times=times, scratch=scratch)
    if row.direction == "backward":
        # After the timing, which a profiler must not disturb.
        row = with_backward_kernels(row, contenders["upconv"], explanation.gradients)
    return row


def with_errors(
    row: Row, inputs: accuracy.Inputs, grad_output: Tensor | None, results: Results
) -> Row:
    """The distance of every result from float64."""
    every = list(results.values())
    if grad_output is None:
        found = accuracy.errors(inputs, row.problem, [result[0] for result in every])
        errors = dict(zip(results, found, strict=True))
        return replace(row, errors=errors, limit=accuracy.limit(row.problem))
    parts = dict(
        zip(results, gradients.errors(inputs, grad_output, row.problem, every), strict=True)
    )
    limits = gradients.limits(row.problem)
    errors = {name: max(own.values()) for name, own in parts.items()}
    return replace(row, errors=errors, limit=max(limits.values()), gradients=parts, limits=limits)


def with_backward_kernels(row: Row, upconv: Contender, plans: Sequence[Plan]) -> Row:
    """What was planned for the gradients, as far as it was seen to run."""
    seen = upconv.do(gradients.kernels_seen)
    planned = dict.fromkeys(plan.kernel for plan in plans)
    own = [kernel for kernel in planned if kernel != ATEN] or [gradients.OWN]
    names = {ATEN: [ATEN], gradients.MIXED: [*own, ATEN]}.get(seen, own)
    reasons = {
        ATEN: "every gradient is computed by PyTorch's operator",
        gradients.MIXED: "some of the gradients are computed by PyTorch's operator",
    }
    return replace(row, kernel=" + ".join(names), reason=reasons.get(seen, ""))


Results = dict[str, tuple[Tensor, ...]]


def first_results(
    names: list[str],
    inputs: accuracy.Inputs,
    problem: Problem,
    skipped: dict[str, str],
    grad_output: Tensor | None,
) -> tuple[dict[str, Contender], Results]:
    """Every contender and its first result, which is when torch.compile compiles.

    A peer that fails is put among the `skipped`; where upconv fails, the case does.
    """
    contenders: dict[str, Contender] = {}
    results: Results = {}
    for name in names:
        try:
            made = contender(name, inputs, problem, grad_output)
            results[name] = made.do(lambda call: call())
            contenders[name] = made
        except (RuntimeError, MemoryError) as error:
            if name == "upconv":
                raise
            skipped[name] = f"failed: {in_words(error)}"
    return contenders, results


def fit_batch(problem: Problem, direction: str = "forward") -> Problem:
    """The problem with its batch halved until one PyTorch call takes less than a second.

    Tried from the small end, so that the full batch is not run where it would take a minute.
    """
    batches = [problem.batch]
    while batches[-1] > 1:
        batches.append(batches[-1] // 2)
    fitting = batches.pop()
    for batch in [fitting, *reversed(batches)]:
        tried = replace(problem, batch=batch)
        inputs = accuracy.make_inputs(tried)
        grad_output = grad_output_for(tried, "cpu", direction)
        call = bound(inputs, accuracy.TORCH_OPERATORS[problem.ndim], grad_output)
        stopwatch.seconds_of(call)
        seconds = max(stopwatch.seconds_of(call) for _ in range(2))
        if seconds > CPU_CALL_LIMIT_S:
            break
        fitting = batch
        if 2 * seconds > 1.2 * CPU_CALL_LIMIT_S:
            break
    return replace(problem, batch=fitting)
