"""`upconv bench`: checks, then times, the same inputs through PyTorch and through upconv.

A row is checked against float64 before anything is timed, and a wrong row is never timed. The
contenders take turns, so that a machine that slows down slows both; medians are reported with the
quartiles beside them.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from math import exp, isfinite, log
from typing import Any

import torch
from torch import Tensor

from . import accuracy
from .cases import Case
from .contenders import Call, Contender, bound, contender, peers
from .doctor import cpu_name
from .explain import explanation_of, tf32_allowed, this_hardware
from .jit import load
from .planner import ATEN, Problem
from .version import __version__

SCHEMA = 2
"""2 added `skipped`, `scratch`, `rates` and contenders other than "torch" and "upconv"."""
CPU_CALL_LIMIT_S = 1.0
"""One PyTorch call on the CPU may take this long; the batch is cut until it does."""
FEWEST_RUNS, MOST_RUNS = 7, 200
FLUSH_BYTES = 256 << 20
"""Written before every timed GPU call: five times the L2 cache of an H200."""

Say = Callable[[str], None]
"""Told what is going on, for the progress bar."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one contender: median, quartiles, fastest, and how many calls."""

    median: float
    low: float
    high: float
    fastest: float
    runs: int

    @staticmethod
    def of(milliseconds: list[float]) -> Timing:
        low, median, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return Timing(median, low, high, min(milliseconds), len(milliseconds))


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
    limit: float = 0.0
    times: dict[str, Timing] = field(default_factory=dict)
    failure: str = ""
    skipped: dict[str, str] = field(default_factory=dict)
    """Contenders that were asked for and not timed, and why."""
    scratch: dict[str, int] = field(default_factory=dict)
    """GPU: bytes that a call allocated beside its inputs and its output, at the peak."""

    @property
    def correct(self) -> bool:
        return not self.failure and self.errors.get("upconv", float("inf")) <= self.limit

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
        flops, traffic = self.problem.flops / 1e9, self.problem.bytes / 1e9
        return {
            name: {"tflop_per_s": flops / timing.median, "tb_per_s": traffic / timing.median}
            for name, timing in self.times.items()
        }

    def as_dict(self) -> dict[str, Any]:
        # JSON knows no infinity: an error without bound is written as null.
        finite = {name: e if isfinite(e) else None for name, e in self.errors.items()}
        derived = {"correct": self.correct, "ratio": self.ratio, "rates": self.rates}
        return asdict(self) | {"errors": finite} | derived

    @staticmethod
    def from_dict(record: dict[str, Any]) -> Row:
        sizes: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in record["problem"].items()
        }
        # Files of schema 1 lack the newer fields.
        known = {name: record[name] for name in Row.__dataclass_fields__ if name in record}
        known["problem"] = Problem(**sizes)
        known["errors"] = {
            name: float("inf") if error is None else error
            for name, error in record["errors"].items()
        }
        known["times"] = {name: Timing(**timing) for name, timing in record["times"].items()}
        return Row(**known)


@dataclass(frozen=True)
class Settings:
    """How to measure: "cpu" or "cuda", a dtype and a layout for every case, seconds for each."""

    device: str = "cpu"
    dtype: str = "float32"
    layout: str = "contiguous"
    seconds: float = 4.0
    """Time spent on the timed calls of one case, about."""
    against: tuple[str, ...] = ("default",)
    """Ways of calling PyTorch, as `--against` names them."""


def summary(rows: list[Row]) -> dict[str, Any]:
    """Geometric mean and worst of the ratios; None where nothing was timed."""
    ratios = {row.case: row.ratio for row in rows if row.ratio is not None}
    if not ratios:
        return {"geometric_mean": None, "worst": None, "worst_case": None, "cases": 0}
    worst_case = min(ratios, key=lambda case: ratios[case])
    return {
        "geometric_mean": exp(sum(map(log, ratios.values())) / len(ratios)),
        "worst": ratios[worst_case],
        "worst_case": worst_case,
        "cases": len(ratios),
    }


def load_average() -> float:
    """Processes that want a core, of the last minute; ask before measuring, not after."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def environment(settings: Settings) -> dict[str, Any]:
    """What a reader must know to compare two result files."""
    machine = this_hardware(settings.device)
    return {
        "upconv": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if settings.device == "cuda" else None,
        "python": platform.python_version(),
        "hardware": asdict(machine) | ({"name": cpu_name()} if machine.kind == "cpu" else {}),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def report(
    rows: list[Row], settings: Settings, complete: bool = True, load: float = 0.0
) -> dict[str, Any]:
    """The result file. `load` is the load average before the first case."""
    return {
        "schema": SCHEMA,
        "environment": environment(settings) | {"load_before": round(load, 2)},
        "settings": asdict(settings),
        "complete": complete,
        "summary": summary(rows),
        "rows": [row.as_dict() for row in rows],
    }


def problem_of(case: Case, settings: Settings) -> Problem:
    """The case at its full batch, as these settings run it."""
    return case.problem(
        dtype=settings.dtype,
        channels_last=settings.layout == "channels_last",
        tf32=settings.device == "cuda" and settings.dtype == "float32" and tf32_allowed(),
    )


def measure(case: Case, settings: Settings, say: Say = lambda stage: None) -> Row:
    """Fit, check and time one case. What goes wrong is in the row, not raised."""
    problem = problem_of(case, settings)
    row = Row(case.name, problem, case.batch, kernel="?")
    try:
        with torch.inference_mode(False), torch.no_grad():
            if settings.device == "cpu":
                say("fitting the batch")
                row = replace(row, problem=fit_batch(problem))
            return checked_and_timed(row, settings, say)
    except (RuntimeError, MemoryError) as error:
        return replace(row, failure=in_words(error))


def in_words(error: Exception) -> str:
    """One line: what kind of error, and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def checked_and_timed(row: Row, settings: Settings, say: Say) -> Row:
    problem, device = row.problem, settings.device
    inputs = accuracy.make_inputs(problem, device)
    explanation = explanation_of(problem, this_hardware(device), here=True)
    library = load(device)
    say("checking against float64")
    names, skipped = peers(settings.against, problem, device)
    contenders, results = first_results([*names, "upconv"], inputs, problem, skipped)
    found = accuracy.errors(inputs, problem, list(results.values()))
    row = replace(
        row,
        kernel=explanation.kernel if library.ok else ATEN,
        reason=library.reason or "; ".join(explanation.refused.values()),
        errors=dict(zip(results, found, strict=True)),
        limit=accuracy.limit(problem),
        skipped=skipped,
    )
    del results
    if not row.correct:
        return row
    for name in [name for name, error in row.errors.items() if error > row.limit]:
        skipped[name] = f"wrong: error {row.errors[name]:.1e} > {row.limit:.1e}"
        del contenders[name]
    say("timing")
    timed = time_on_gpu if device == "cuda" else time_on_cpu
    times = timed(contenders, settings.seconds)
    scratch = {name: c.do(scratch_bytes) for name, c in contenders.items() if device == "cuda"}
    return replace(
        row, times={name: Timing.of(values) for name, values in times.items()}, scratch=scratch
    )


def first_results(
    names: list[str], inputs: accuracy.Inputs, problem: Problem, skipped: dict[str, str]
) -> tuple[dict[str, Contender], dict[str, Tensor]]:
    """Every contender and its first result, which is when torch.compile compiles.

    A peer that fails is put among the `skipped`; where upconv fails, the case does.
    """
    contenders: dict[str, Contender] = {}
    results: dict[str, Tensor] = {}
    for name in names:
        try:
            made = contender(name, inputs, problem)
            results[name] = made.do(lambda call: call())
            contenders[name] = made
        except (RuntimeError, MemoryError) as error:
            if name == "upconv":
                raise
            skipped[name] = f"failed: {in_words(error)}"
    return contenders, results


def scratch_bytes(call: Call) -> int:
    """What one call on the GPU allocates at its peak, beside the output that it returns."""
    # As requested: the allocator rounds up, by as much as 1 MiB where it does not split a block.
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    output = call()
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return max(0, int(peak - before - output.untyped_storage().nbytes()))


def fit_batch(problem: Problem) -> Problem:
    """The problem with its batch halved until one PyTorch call takes less than a second.

    Tried from the small end, so that the full batch is not run where it would take a minute.
    """
    batches = [problem.batch]
    while batches[-1] > 1:
        batches.append(batches[-1] // 2)
    fitting = batches.pop()
    for batch in [fitting, *reversed(batches)]:
        inputs = accuracy.make_inputs(replace(problem, batch=batch))
        call = bound(inputs, accuracy.TORCH_OPERATORS[problem.ndim])
        seconds_of(call)
        seconds = max(seconds_of(call) for _ in range(2))
        if seconds > CPU_CALL_LIMIT_S:
            break
        fitting = batch
        if 2 * seconds > 1.2 * CPU_CALL_LIMIT_S:
            break
    return replace(problem, batch=fitting)


def seconds_of(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def runs_for(seconds: float, round_seconds: float) -> int:
    return max(FEWEST_RUNS, min(MOST_RUNS, int(seconds / max(round_seconds, 1e-6))))


def turns(names: list[str], runs: int) -> Iterator[str]:
    """Who is next: in order, then in reverse, so that no one is always first."""
    for run in range(runs):
        yield from names if run % 2 == 0 else reversed(names)


def time_on_cpu(contenders: dict[str, Contender], seconds: float) -> dict[str, list[float]]:
    calls = {name: one.call for name, one in contenders.items()}
    for call in calls.values():
        seconds_of(call)
    once = sum(seconds_of(call) for call in calls.values())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns(list(calls), runs_for(seconds, once)):
        times[name].append(seconds_of(calls[name]) * 1e3)
    return times


def time_on_gpu(contenders: dict[str, Contender], seconds: float) -> dict[str, list[float]]:
    """By CUDA events, each call after a flush of L2 that also hides the launch."""
    event: Any = torch.cuda.Event  # untyped in some versions of torch
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def milliseconds(call: Call) -> float:
        start, end = event(enable_timing=True), event(enable_timing=True)
        flushed.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    for one in contenders.values():
        for _ in range(3):
            one.do(milliseconds)
    once = sum(one.do(milliseconds) for one in contenders.values()) / 1e3
    times: dict[str, list[float]] = {name: [] for name in contenders}
    # The flush and the synchronisation take about 0.2 ms a call beside the call itself.
    for name in turns(list(contenders), runs_for(seconds, once + 2e-4 * len(contenders))):
        times[name].append(contenders[name].do(milliseconds))
    return times
