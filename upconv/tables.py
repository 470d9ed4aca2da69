"""Results as tables: for the terminal, and as the markdown that the README shows."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from .bench import Kind, Row, by_kind, summary
from .comparison import Comparison
from .contenders import TITLES
from .explain import shorthand
from .results import ResultsError as ResultsError
from .results import read_results as read_results
from .results import rows_of


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


def digits(value: float) -> str:
    """Three that matter."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def time_text(row: Row, name: str, spread: bool = True) -> str:
    """Median, and the distance of the quartiles from it in percent."""
    if name not in row.times:
        return "-"
    timing = row.times[name]
    text = digits(timing.median)
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
        return f"WRONG: {row.wrong('upconv')}"
    others = [error for name, error in row.errors.items() if name != "upconv"]
    worst = f" ({max(others):.1e})" if others else ""
    return f"{row.errors['upconv']:.1e}{worst}"


def ratio_text(row: Row) -> str:
    return "-" if row.ratio is None else f"{row.ratio:.2f}x"


def floor_text(row: Row) -> str:
    share = row.share_of_floor.get("upconv")
    return "-" if share is None else f"{share:.0%}"


def speed_texts(row: Row) -> tuple[str, str]:
    """TFLOP/s and TB/s of upconv: work and least traffic by time."""
    rates = row.rates.get("upconv")
    if rates is None:
        return "-", "-"
    return f"{rates['tflop_per_s']:.3g}", f"{rates['tb_per_s']:.3g}"


def size_text(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{digits(size / 2**20)} MiB" if size else "0"


def contenders_of(rows: list[Row]) -> list[str]:
    """Everyone timed or asked for in one of the rows, upconv last."""
    there = {name for row in rows for name in (*row.times, *row.skipped)} | {"upconv"}
    if not any(row.skipped or row.times for row in rows):
        there.add("torch")
    return [name for name in TITLES if name in there]


def time_columns(names: list[str]) -> list[str]:
    """A column of times for each, and one that compares upconv with the fastest of the others."""
    gain = "speed-up" if len(names) <= 2 else "over the fastest"
    return [*(f"{TITLES[name]} ms" for name in names), gain]


def terminal_table(rows: list[Row], title: str) -> Table:
    names = contenders_of(rows)
    table = Table(title=title, title_justify="left")
    on_gpu = any(row.scratch for row in rows)
    beside = ("TFLOP/s", "TB/s", "of floor", *(["scratch"] if on_gpu else []))
    for column in ("case", "batch", "kernel", "error (PyTorch's)", *time_columns(names), *beside):
        table.add_column(column, justify="left" if column in ("case", "kernel") else "right")
    for row in rows:
        bad = row.failure or not row.correct or (row.ratio or 1) < 0.95
        times = [time_text(row, name) for name in names]
        cells = [row.case, batch_text(row), row.kernel, verdict(row), *times, ratio_text(row)]
        cells += [*speed_texts(row), floor_text(row)]
        cells += [size_text(row.scratch.get("upconv"))] * on_gpu
        table.add_row(*cells, style="red" if bad else None)
    return table


def skipped_lines(rows: list[Row]) -> list[str]:
    """Why contenders were not timed: one line for each reason, with its cases."""
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.skipped.items():
            cases.setdefault((name, reason), []).append(row.case)
    return [
        f"{name} was not timed ({'all cases' if len(of) == len(rows) else _listed(of)}): {reason}"
        for (name, reason), of in cases.items()
    ]


def _listed(cases: list[str]) -> str:
    return ", ".join(dict.fromkeys(cases))


def comparison_table(comparison: Comparison, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("case", "old ms", "new ms", "new / old", "spread", "verdict"):
        table.add_column(column, justify="left" if column in ("case", "verdict") else "right")
    styles = {"slower": "red", "WRONG now": "red", "faster": "green"}
    for change in comparison.changes:
        table.add_row(
            change.case,
            digits(change.old.median),
            digits(change.new.median) if change.new else "-",
            f"{change.ratio:.2f}" if change.ratio else "-",
            f"±{change.spread:.0%}",
            change.verdict,
            style=styles.get(change.verdict),
        )
    return table


def comparison_lines(comparison: Comparison) -> list[str]:
    """What is beside the table: the count of each verdict, what was left out, what else changed."""
    verdicts = [change.verdict for change in comparison.changes]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return [
        f"{len(verdicts)} cases compared: {said}" if verdicts else "no case is in both files",
        *(f"{case} was left out: {reason}" for case, reason in comparison.left_out.items()),
        *(f"not the same: {note}" for note in comparison.notes),
    ]


def summary_line(found: dict[str, Any]) -> str:
    if not found["cases"]:
        return "nothing was timed"
    return (
        f"{found['cases']} cases: geometric mean {found['geometric_mean']:.2f}x, "
        f"worst {found['worst']:.2f}x ({found['worst_case']})"
    )


def machine_text(results: dict[str, Any]) -> str:
    machine = results["environment"]["hardware"]
    where = str(machine["name"] or machine["kind"])
    if machine["kind"] == "cpu":
        threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"
        where += f", {threads}, {machine['isa']}"
    return where


def conditions(results: dict[str, Any], kind: Kind) -> str:
    """Where and how a table's rows were measured, in two lines."""
    environment = results["environment"]
    return (
        f"{machine_text(results)}; {kind};\n"
        f"PyTorch {environment['torch']}, upconv {environment['upconv']}, {environment['date']}"
    )


def rates_lines(results: dict[str, Any]) -> list[str]:
    """What the floor was computed from."""
    return [
        f"floor: {dtype} {rates['flop_per_s'] / 1e12:.3g} TFLOP/s in a matrix product, "
        f"{rates['byte_per_s'] / 1e12:.3g} TB/s in a copy, both measured in this run"
        for dtype, rates in results.get("machine_rates", {}).items()
    ]


def markdown(results: dict[str, Any]) -> str:
    """The tables of the README, one for each dtype, layout and direction."""
    tables = [
        markdown_table(results, kind, rows) for kind, rows in by_kind(rows_of(results)).items()
    ]
    return "\n\n".join(tables)


def markdown_table(results: dict[str, Any], kind: Kind, rows: list[Row]) -> str:
    """Times are medians; the error is a share of the largest output."""
    names = contenders_of(rows)
    with_floor = any(row.floor_ms is not None for row in rows)
    shares = ("of floor",) if with_floor else ()
    columns = ("case", "layer", "batch", "kernel", *time_columns(names), *shares, "error")
    lines = [
        f"{conditions(results, kind)}.",
        "",
        f"**{summary_line(summary(rows))}**",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for row in rows:
        error = f"{row.errors['upconv']:.1e}" if row.correct else verdict(row)
        times = [time_text(row, name, spread=False) for name in names]
        texts = [row.case, layer_text(row), batch_text(row), row.kernel, *times, ratio_text(row)]
        texts += [floor_text(row)] * with_floor
        lines.append(f"| {' | '.join([*texts, error])} |")
    return "\n".join(lines)
