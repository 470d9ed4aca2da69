"""The command `upconv bench`: which cases, what is kept of an earlier run, and what is shown.

The file of `--out` is written after every case, so that a run that was stopped can go on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import bench, tables
from .bench import Row, Settings
from .cli import (
    FAILED,
    FINE,
    INTERRUPTED,
    UsageError,
    case_from_options,
    layer_given,
)
from .comparison import compare
from .floor import Rates, measured_rates
from .results import (
    Earlier,
    csv_text,
    earlier,
    holds,
    read_results,
    rows_of,
    write_results,
    write_whole,
)

if TYPE_CHECKING:
    from .cases import Case

DIRECTIONS = ("forward", "backward")
MOST_THREADS = 1024
"""The process dies, without a word, when the system refuses torch one of them."""


def run(options: argparse.Namespace) -> int:
    check_files(options)
    old = read_results(options.compare) if options.compare else None
    results = read_results(options.results) if options.results else measured(options)
    rows = rows_of(results)
    # With --compare two files are the question, and the table of one of them is not.
    if not (options.results and old):
        show_results(rows, results, options.markdown)
    if options.csv:
        write_whole(options.csv, csv_text(results))
        print(f"written: {options.csv}", file=sys.stderr)
    worse = old is not None and show_comparison(old, results, options.compare)
    if not (options.results or results["complete"]):
        return INTERRUPTED
    return FINE if all(row.correct for row in rows) and not worse else FAILED


def check_files(options: argparse.Namespace) -> None:
    """What cannot be written or does not go together is said before anything is measured."""
    for name in ("out", "csv"):
        given = getattr(options, name)
        if given and not Path(given).resolve().parent.is_dir():
            raise UsageError(f"--{name} {given}: its folder does not exist")
        if given and Path(given).exists() and not Path(given).is_file():
            raise UsageError(f"--{name} {given} is not a plain file")
    if options.resume and not options.out:
        raise UsageError("--resume goes on with the file of --out: give that too")
    if options.resume and options.force:
        raise UsageError("--resume keeps what the file of --out holds, --force drops it: give one")
    if not (options.resume or options.force):
        refuse_to_overwrite(options)
    if options.results:
        measuring = {"cases": options.cases, "--out": options.out, "a layer": layer_given(options)}
        given = [name for name, value in measuring.items() if value]
        if given:
            raise UsageError(f"--results measures nothing: it does not go with {given[0]}")


def refuse_to_overwrite(options: argparse.Namespace) -> None:
    """A name typed wrongly must not cost the hour that another run took. Empty files hold none."""
    ways = {
        "out": "go on with it (--resume), overwrite it (--force)",
        "csv": "overwrite it (--force)",
    }
    for name, instead in ways.items():
        given = getattr(options, name)
        if given and Path(given).exists() and Path(given).stat().st_size:
            raise UsageError(f"--{name} {given} exists already: {instead}, or choose another name")


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The cases asked for, at the batch asked for."""
    from .cases import select
    from .explain import check

    if layer_given(options):
        if options.cases:
            raise UsageError("give either cases or a layer by options, not both")
        case = case_from_options(options)
        check(case.problem())
        chosen = [case]
    else:
        chosen = select(options.cases, {options.dims} if options.dims else None)
    if options.batch is not None:
        if options.batch < 1:
            raise UsageError(f"--batch must be at least 1, got {options.batch}")
        chosen = [case._replace(batch=options.batch) for case in chosen]
    return chosen


def settings_of(options: argparse.Namespace) -> list[Settings]:
    """One for each dtype, layout and direction asked for."""
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA GPU here; `upconv doctor` says more")
    if device == "cpu" and options.against == ("benchmark",):
        raise UsageError("--against benchmark: cudnn.benchmark is for GPUs only; add default")
    dtypes = options.dtype or (("tf32",) if device == "cuda" else ("float32",))
    if device == "cpu" and "tf32" in dtypes:
        raise UsageError("--dtype tf32 is for GPUs only: a CPU multiplies float32 as it is")
    if not 0 <= options.seconds < float("inf"):
        raise UsageError(f"--seconds must be a number from 0 on, got {options.seconds:g}")
    if options.threads is not None:
        if not 1 <= options.threads <= MOST_THREADS:
            raise UsageError(
                f"--threads must be from 1 to {MOST_THREADS}, got {options.threads}; "
                f"this machine has {os.cpu_count()} cores"
            )
        torch.set_num_threads(options.threads)
    directions = DIRECTIONS if options.direction == "both" else (options.direction,)
    return [
        Settings(device, dtype, layout, options.seconds, options.against, direction, options.commit)
        for dtype, layout, direction in product(dtypes, options.layout, directions)
    ]


Job = tuple["Case", Settings]


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Everything to measure, in the order of the tables."""
    cases, kinds = cases_of(options), settings_of(options)
    jobs = [
        (case, settings)
        for settings in kinds
        for case in cases
        if case.ndim > 1 or settings.layout != "channels_last"
    ]
    if not jobs:
        raise UsageError("1-D tensors have no channels_last layout")
    return jobs


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The results of this run, with what `--resume` found in the file; written to `--out`."""
    jobs = jobs_of(options)
    settings = jobs[0][1]
    kept, rates, commit = (
        earlier(options.out, settings) if options.resume else Earlier([], {}, None)
    )
    now = settings.commit or bench.commit()
    if kept and commit and now and commit != now:
        settings = replace(settings, commit=f"{commit} and {now}")
    left = [(case, how) for case, how in jobs if not holds(kept, case, how)]
    if kept:
        print(f"{options.out} holds {len(kept)} rows; {len(left)} to measure", file=sys.stderr)
    load = bench.load_average()
    if left and settings.device == "cpu" and load > 0.5:
        print(f"other programs are running (load {load:.1f}): times will vary", file=sys.stderr)
    rows = list(kept)

    def results(complete: bool) -> dict[str, Any]:
        found = bench.report(in_order(rows, jobs), settings, complete, load, rates)
        # A stop before the first case must not empty a file of earlier results.
        if options.out and (rows or complete):
            write_results(options.out, found)
        return found

    complete = measure_all(left, rows, rates, lambda: results(complete=False))
    final = results(complete)
    if not complete:
        print(f"stopped; {how_to_go_on(len(rows), options.out)}", file=sys.stderr)
    elif options.out:
        print(f"written: {options.out}", file=sys.stderr)
    return final


def in_order(rows: list[Row], jobs: list[Job]) -> list[Row]:
    """As the jobs are; rows of other jobs, from an earlier run, stand first."""
    places = {
        (case.name, settings.dtype, settings.layout, settings.direction): place
        for place, (case, settings) in enumerate(jobs)
    }
    return sorted(rows, key=lambda row: places.get((row.case, *row.kind), -1))


def how_to_go_on(rows: int, path: str | None) -> str:
    if not rows:
        return "no case was finished, nothing was written"
    if path is None:
        return "nothing was written: with --out FILE a run can be resumed"
    return f"{path} holds {rows} rows: the same command with --resume goes on from there"


def measure_all(
    jobs: list[Job], rows: list[Row], rates: dict[str, Rates], save: Callable[[], object]
) -> bool:
    """Every job under a progress bar, added to the rows; False where the user stopped it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task("starting", total=len(jobs))
            for case, settings in jobs:
                dtype = settings.dtype
                if dtype not in rates:
                    progress.update(task, description=f"the machine's rates in {dtype}")
                    rates[dtype] = measured_rates(settings.device, dtype, settings.seconds)

                def say(stage: str, name: str = f"{case.name} {settings.direction}") -> None:
                    progress.update(task, description=f"{name}: {stage}")

                rows.append(bench.measure(case, settings, say, rates[dtype]))
                save()
                progress.advance(task)
    except KeyboardInterrupt:
        return False
    return True


def console_for(columns: int) -> Console:
    """A file or a pipe has no width: as wide as the table needs."""
    return Console(width=None if sys.stdout.isatty() else columns)


def show_results(rows: list[Row], results: dict[str, Any], as_markdown: bool) -> None:
    if as_markdown:
        print(tables.markdown(results))
        return
    # 150 columns hold the table of one contender, another one takes 20.
    console = console_for(110 + 20 * len(tables.contenders_of(rows)))
    for kind, some in bench.by_kind(rows).items():
        console.print(tables.terminal_table(some, tables.conditions(results, kind)))
        print(tables.summary_line(bench.summary(some)))
    for line in [*tables.rates_lines(results), *tables.skipped_lines(rows)]:
        print(line)
    refused = {
        f"{row.case}, {row.direction}": row.reason
        for row in rows
        if (row.by_pytorch or row.partly_by_pytorch) and row.reason
    }
    for case, reason in refused.items():
        print(f"{case}: PyTorch's operator was taken: {reason}")


def show_comparison(old: dict[str, Any], new: dict[str, Any], name: str) -> bool:
    """Prints it; True where something got worse."""
    comparison = compare(old, new)
    if comparison.changes:
        title = f"upconv's times against {name}"
        console_for(120).print(tables.comparison_table(comparison, title))
    for line in tables.comparison_lines(comparison):
        print(line)
    return comparison.bad
