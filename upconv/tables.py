"""Results as tables: for the terminal, and as the markdown that the README shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from .bench import SCHEMA, Row
from .explain import shorthand

ROW_ADVICE = "measure again with `upconv bench --out FILE.json`"


class ResultsError(Exception):
    """A file that does not hold results; the text says what to do."""


def read_results(path: str | Path) -> dict[str, Any]:
    try:
        results = json.loads(Path(path).read_text())
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{path} is not JSON ({error}): {ROW_ADVICE}") from error
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        raise ResultsError(f"{path} does not hold results of schema {SCHEMA}: {ROW_ADVICE}")
    return results


def layer_text(row: Row) -> str:
    """64 -> 128, 128x256, k 3x5: what the case is, in few letters."""
    problem = row.problem
    parts = [
        f"{problem.in_channels} → {problem.out_channels}",
        "x".join(map(str, problem.in_size)),
        f"k {shorthand(problem.kernel)}",
    ]
    for letter, values, usual in (
        ("s", problem.stride, 1),
        ("p", problem.padding, 0),
        ("op", problem.output_padding, 0),
        ("d", problem.dilation, 1),
    ):
        if set(values) != {usual}:
            parts.append(f"{letter} {shorthand(values)}")
    if problem.groups > 1:
        parts.append(f"g {problem.groups}")
    return ", ".join(parts)


def milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def time_text(row: Row, name: str, spread: bool = True) -> str:
    """Median, and the distance of the quartiles from it in percent."""
    if name not in row.times:
        return "-"
    timing = row.times[name]
    text = milliseconds(timing.median)
    if spread:
        text += f" ±{(timing.high - timing.low) / 2 / timing.median:.0%}"
    return text


def batch_text(row: Row) -> str:
    whole = row.problem.batch == row.full_batch
    return str(row.problem.batch) if whole else f"{row.problem.batch} of {row.full_batch}"


def verdict(row: Row) -> str:
    if row.failure:
        return f"failed: {row.failure}"
    if not row.correct:
        return f"WRONG: error {row.errors['upconv']:.1e} > {row.limit:.1e}"
    return f"{row.errors['upconv']:.1e} ({row.errors['torch']:.1e})"


def ratio_text(row: Row) -> str:
    return "-" if row.ratio is None else f"{row.ratio:.2f}x"


COLUMNS = ("case", "batch", "kernel", "error (PyTorch's)", "PyTorch ms", "upconv ms", "speed-up")


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.case,
        batch_text(row),
        row.kernel,
        verdict(row),
        time_text(row, "torch"),
        time_text(row, "upconv"),
        ratio_text(row),
    )


def terminal_table(rows: list[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("case", "kernel") else "right")
    for row in rows:
        bad = row.failure or not row.correct or (row.ratio or 1) < 0.95
        table.add_row(*cells(row), style="red" if bad else None)
    return table


def summary_line(summary: dict[str, Any]) -> str:
    if not summary["cases"]:
        return "nothing was timed"
    return (
        f"{summary['cases']} cases: geometric mean {summary['geometric_mean']:.2f}x, "
        f"worst {summary['worst']:.2f}x ({summary['worst_case']})"
    )


def conditions(results: dict[str, Any]) -> str:
    """Where and how the results were measured, in two lines."""
    environment, settings = results["environment"], results["settings"]
    machine = environment["hardware"]
    where = machine["name"] or machine["kind"]
    if machine["kind"] == "cpu":
        threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"
        where += f", {threads}, {machine['isa']}"
    return (
        f"{where}; {settings['dtype']}, {settings['layout']}, forward;\n"
        f"PyTorch {environment['torch']}, upconv {environment['upconv']}, {environment['date']}"
    )


def markdown(results: dict[str, Any]) -> str:
    """The table of the README. Times are medians; the error is a share of the largest output."""
    rows = [Row.from_dict(record) for record in results["rows"]]
    lines = [
        f"{conditions(results)}.",
        "",
        f"**{summary_line(results['summary'])}**",
        "",
        "| case | layer | batch | kernel | PyTorch ms | upconv ms | speed-up | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = f"{row.errors['upconv']:.1e}" if row.correct else verdict(row)
        texts = (
            row.case,
            layer_text(row),
            batch_text(row),
            row.kernel,
            time_text(row, "torch", spread=False),
            time_text(row, "upconv", spread=False),
            ratio_text(row),
            error,
        )
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)
