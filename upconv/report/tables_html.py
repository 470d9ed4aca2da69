"""The tables of the page: every time, every error, all scratch memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ..bench import Row
from ..contenders import TITLES
from ..gradients import NAMES
from ..tables import batch_text, layer_text
from .charts import tagged
from .entries import Collection, Entry
from .marks import attributes, number, times

WORDS = ("kernel", "layer", "of")
"""Columns that hold no numbers."""


def table(caption: str, columns: Sequence[str], rows: Iterable[str], identity: str) -> str:
    """The first column names the row; the others hold numbers, but for WORDS."""
    heads = "".join(
        f'<th scope="col"{attributes(class_="words" if column in WORDS else None)}>'
        f"{escape(column)}</th>"
        for column in columns
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{identity}">'
        f'<table><caption id="{identity}"><span>{caption}</span></caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def cell(words: str, style: str = "") -> str:
    return f"<td{attributes(class_=style or None)}>{words}</td>"


def first_cell(entry: Entry, several: bool) -> str:
    """The case; what kind of row it is, where rows of several kinds share the table."""
    kind = f'<span class="sub">{escape(str(entry.row.kind))}</span>' if several else ""
    return f'<th scope="row">{escape(entry.row.case)}{kind}</th>'


def contenders_of(entries: Iterable[Entry]) -> list[str]:
    there = {name for entry in entries for name in (*entry.row.times, *entry.row.skipped)}
    return [name for name in TITLES if name in there | {"upconv"}]


def times_table(collection: Collection) -> str:
    """Its rows carry what the script counts: ratio, verdict, whose operator ran."""
    names = contenders_of(collection.entries)
    several = len(collection.groups) > 1
    columns = ["case", "speed-up", *(f"{TITLES[name]} ms" for name in names)]
    columns += ["TFLOP/s", "TB/s", "of floor", "batch", "kernel", "layer"]
    rows = []
    for entry in collection.entries:
        row = entry.row
        counted = attributes(
            data_ratio=row.ratio,
            data_verdict=entry.verdict,
            data_aten=int(row.by_pytorch),
            data_case=row.case,
            data_share=row.share_of_floor.get("upconv"),
            class_=entry.verdict,
        )
        cells = [
            first_cell(entry, several),
            cell(verdict_cell(entry), "ratio"),
            *(cell(time_cell(row, name), "best" if fastest(row) == name else "") for name in names),
            *speed_cells(row),
            cell(batch_text(row)),
            cell(escape(row.kernel), "words kernel"),
            cell(escape(layer_text(row)), "words"),
        ]
        rows.append(f"<tr{tagged(entry)}{counted}>{''.join(cells)}</tr>")
    caption = (
        "Medians in milliseconds with the distance of the quartiles. The speed-up is over the "
        "fastest way of calling PyTorch that was timed; the fastest time of a row is bold."
    )
    return table(caption, columns, rows, "times-caption")


def fastest(row: Row) -> str | None:
    return min(row.times, key=lambda name: row.times[name].median, default=None)


def time_cell(row: Row, name: str) -> str:
    if name in row.times:
        timing = row.times[name]
        spread = (timing.high - timing.low) / 2 / timing.median
        return f"{number(timing.median)} <small>±{spread:.0%}</small>"
    return f'<abbr title="{escape(row.skipped[name])}">–</abbr>' if name in row.skipped else "–"


def verdict_cell(entry: Entry) -> str:
    row = entry.row
    if row.failure:
        return f'<strong class="bad">failed</strong> <small>{escape(row.failure)}</small>'
    if not row.correct:
        return f'<strong class="bad">wrong</strong> <small>{escape(row.wrong("upconv"))}</small>'
    if row.ratio is None:
        return "–"
    word = ' <span class="bad">slower</span>' if entry.verdict == "slower" else ""
    return f"{times(row.ratio)}{word}"


def speed_cells(row: Row) -> list[str]:
    rates, share = row.rates.get("upconv"), row.share_of_floor.get("upconv")
    return [
        cell(number(rates["tflop_per_s"]) if rates else "–"),
        cell(number(rates["tb_per_s"]) if rates else "–"),
        cell("–" if share is None else f"{share:.0%}"),
    ]


def errors_table(collection: Collection) -> str:
    checked = [entry for entry in collection.entries if entry.row.errors]
    if not checked:
        return '<p class="note">No result was checked.</p>'
    names = [name for name in TITLES if any(name in entry.row.errors for entry in checked)]
    several = len(collection.groups) > 1
    columns = ["case", "of", *(TITLES[name] for name in names), "allowed", "upconv ÷ PyTorch"]
    rows = [line for entry in checked for line in error_lines(entry, names, several)]
    caption = (
        "Largest distance from the same computation in float64, as a share of the largest value. "
        "A row was timed only where upconv stayed within what rounding allows."
    )
    return table(caption, columns, rows, "errors-caption")


def error_lines(entry: Entry, names: Sequence[str], several: bool) -> list[str]:
    """One line forward, one for each gradient backward."""
    row = entry.row
    parts = {"output": (row.errors, row.limit)}
    if row.direction == "backward":
        parts = {
            f"gradient of {part}": (
                {name: own[part] for name, own in row.gradients.items() if part in own},
                row.limits.get(part, 0.0),
            )
            for part in NAMES
            if part in row.limits
        }
    lines = []
    for what, (errors, limit) in parts.items():
        cells = [first_cell(entry, several), cell(what, "words")]
        for name in names:
            error = errors.get(name)
            bad = error is not None and not error <= limit
            cells.append(cell("–" if error is None else f"{error:.1e}", "bad" if bad else ""))
        theirs, ours = errors.get("torch"), errors.get("upconv")
        ratio = f"{ours / theirs:.2f}" if ours is not None and theirs else "–"
        cells += [cell(f"{limit:.1e}"), cell(ratio)]
        lines.append(f"<tr{tagged(entry)}>{''.join(cells)}</tr>")
    return lines


def memory_table(collection: Collection) -> str:
    with_memory = [entry for entry in collection.entries if entry.row.scratch]
    if not with_memory:
        return (
            '<p class="note">Scratch memory is measured on GPUs only; '
            "no row here has a figure for it.</p>"
        )
    names = [name for name in TITLES if any(name in e.row.scratch for e in with_memory)]
    several = len(collection.groups) > 1
    columns = ["case", "moved at least", *(TITLES[name] for name in names)]
    rows = []
    for entry in with_memory:
        scratch = entry.row.scratch
        cells = [first_cell(entry, several), cell(mebibytes(entry.row.problem.bytes))]
        cells += [cell(mebibytes(scratch[n]) if n in scratch else "–") for n in names]
        rows.append(f"<tr{tagged(entry)}>{''.join(cells)}</tr>")
    caption = (
        "MiB that one call allocates at its peak beside its inputs and results, and the bytes of "
        "input, weight and output for comparison."
    )
    return table(caption, columns, rows, "memory-caption")


def mebibytes(size: int) -> str:
    return "0" if size == 0 else number(size / 2**20) if size >= 2**20 else "< 1"
