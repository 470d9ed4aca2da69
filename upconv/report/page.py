"""The page around charts and tables: heading, filters, what was measured and how."""

from __future__ import annotations

from html import escape
from pathlib import Path
from urllib.parse import urlencode

from .. import tables
from ..bench import SCHEMA
from . import charts, tables_html
from .charts import group_words
from .entries import EVEN, FACETS, Collection, Entry, Source, geometric_mean
from .marks import attributes, percent, times

HERE = Path(__file__).parent


def page(collection: Collection) -> str:
    style = "\n".join((HERE / name).read_text() for name in ("page.css", "media.css"))
    script = (HERE / "filters.js").read_text()
    body = "".join(
        [
            header(collection),
            "<main>",
            chapter("At a glance", "", summaries(collection)),
            filters(collection),
            chapter("Speed-up", SPEED_UP, charts.speed_up_chart(collection)),
            chapter("Distance to the floor", FLOOR, charts.floor_chart(collection)),
            chapter("Rooflines", ROOFLINE, charts.rooflines(collection)),
            chapter("Times", "", tables_html.times_table(collection)),
            chapter("Errors", "", tables_html.errors_table(collection)),
            chapter("Scratch memory", "", tables_html.memory_table(collection)),
            chapter("What was left out, and why", "", left_out(collection)),
            chapter("How it was measured", "", method(collection)),
            "</main>",
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # An icon that is empty: a browser then asks no server for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>upconv against PyTorch: {escape(machines(collection))}</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n{body}\n<script>\n{script}</script>\n"
        "</body>\n</html>\n"
    )


SPEED_UP = (
    "How many times as fast as PyTorch, on a scale where every step doubles. Bars to the right of "
    "the line at 1× are faster, bars to the left are slower."
)
FLOOR = (
    "How many times the floor a call takes. The floor is the longer of two times: that of the "
    "arithmetic at the rate of a large matrix product, and that of moving each byte of input, "
    "weight and output once at the rate of a large copy, both measured on the machine in the same "
    "run. Further left is better; no one can be far left of 1×."
)
ROOFLINE = (
    "The same against the two limits: under the slope memory decides, under the ceiling arithmetic "
    "does. A line joins PyTorch’s time with upconv’s for the same layer."
)


def machines(collection: Collection) -> str:
    return "; ".join(collection.values("machine"))


def header(collection: Collection) -> str:
    """What a reader must know to judge the numbers: where, with what, when, from which files."""
    files: dict[tuple[str, ...], list[str]] = {}
    for source in collection.sources:
        known = source.environment
        facts = [f"PyTorch {known['torch']}"]
        if known.get("cuda"):
            facts.append(f"CUDA {known['cuda']}")
        commit = known.get("commit")
        facts.append(f"upconv {known['upconv']}, commit {commit or 'not recorded'}")
        facts.append(f"measured on {known['date']}")
        name = f"<code>{escape(source.name)}</code>{notes(source)}"
        files.setdefault((source.machine, *facts), []).append(name)
    items = "".join(
        f"<li><strong>{escape(machine)}</strong><br>{escape('; '.join(facts))}"
        f'<br><span class="soft">from {", ".join(names)}</span></li>'
        for (machine, *facts), names in files.items()
    )
    return (
        "<header><h1>Transposed convolutions: upconv against PyTorch</h1>"
        f'<ul class="facts">{items}</ul></header>'
    )


def notes(source: Source) -> str:
    found = []
    if source.schema < SCHEMA:
        found.append("older format, without the floor")
    if not source.complete:
        found.append("stopped before its end")
    return f" ({'; '.join(found)})" if found else ""


def filters(collection: Collection) -> str:
    """One choice a facet; facets with a single value need none. Shown by the script."""
    sets = []
    for facet, title in FACETS.items():
        values = collection.values(facet)
        if len(values) < 2:
            continue
        choices = [("", "all"), *((value, value) for value in values)]
        inputs = "".join(
            f'<label><input type="radio" name="{facet}" value="{escape(value)}"'
            f"{' checked' if not value else ''}><span>{escape(words)}</span></label>"
            for value, words in choices
        )
        legend = f"<legend>{title}</legend>"
        sets.append(f'<fieldset>{legend}<div class="choices">{inputs}</div></fieldset>')
    count = len(collection.entries)
    status = f'<p class="status" aria-live="polite" data-status>{count} of {count} rows shown</p>'
    return f'<form class="filters" aria-label="Filters" hidden>{"".join(sets)}{status}</form>'


def chapter(title: str, intro: str, content: str) -> str:
    identity = title.split(",")[0].lower().replace(" ", "-")
    words = f'<p class="intro">{intro}</p>' if intro else ""
    return (
        f'<section class="chapter" aria-labelledby="{identity}">'
        f'<h2 id="{identity}">{title}</h2>{words}{content}</section>'
    )


def summaries(collection: Collection) -> str:
    """A row for each kind, whatever the filters say; its name chooses that kind."""
    rows = []
    for group, entries in collection.groups.items():
        names = ("machine", "dtype", "layout", "direction")
        choice = urlencode(dict(zip(names, group, strict=True)))
        name = f'<a href="#{escape(choice)}">{escape(group_words(group))}</a>'
        if len(collection.values("machine")) > 1:
            name += f'<span class="machine">{escape(group[0])}</span>'
        rows.append(f'<tr><th scope="row">{name}</th>{summary_cells(entries)}</tr>')
    caption = (
        "Speed-up over the fastest way of calling PyTorch that was timed: geometric mean, worst. "
        f"Even means within {EVEN:.0%}; layers that run PyTorch’s own operator are counted too."
    )
    columns = ("kind", "mean", "worst", "faster, even, slower", "layers", "PyTorch’s operator")
    return tables_html.table(caption, columns, rows, "summary-caption")


def summary_cells(entries: list[Entry]) -> str:
    # A list: a case can stand here twice, at two batches.
    ratios = [(entry.row.ratio, entry.row.case) for entry in entries if entry.row.ratio]
    mean = geometric_mean([ratio for ratio, _ in ratios])
    verdicts = [entry.verdict for entry in entries]
    counts = {name: verdicts.count(name) for name in ("faster", "even", "slower")}
    worst_ratio, worst = min(ratios, default=(0.0, ""))
    wrong = verdicts.count("wrong")
    shown = [
        f"<strong>{times(mean)}</strong>" if mean else "–",
        f"{times(worst_ratio)} <small>{escape(worst)}</small>" if worst else "–",
        tally(counts),
        str(len(entries)) + (f' <span class="bad">{wrong} wrong</span>' if wrong else ""),
        str(sum(entry.row.by_pytorch for entry in entries)),
    ]
    return "".join(f"<td>{words}</td>" for words in shown)


def tally(counts: dict[str, int]) -> str:
    """The counts, and a bar of their shares."""
    total = sum(counts.values()) or 1
    bits, at = [], 0.0
    for name, count in counts.items():
        share = 100 * count / total
        place = attributes(class_=f"share {name}", x=percent(at), width=percent(share), height=10)
        bits.append(f"<rect{place}/>" if count else "")
        at += share
    words = ", ".join(str(count) for count in counts.values())
    bar = f'<svg class="tally" width="96" height="10" aria-hidden="true">{"".join(bits)}</svg>'
    return f"{bar}{words}"


def left_out(collection: Collection) -> str:
    lines = []
    rows = [entry.row for entry in collection.entries]
    lines += tables.skipped_lines(rows)
    if collection.replaced:
        lines.append(f"{collection.replaced} rows stand in two files: the later file’s are shown")
    listed = "".join(f"<li>{escape(said)}</li>" for said in lines)
    own = [
        f"<li{charts.tagged(entry)}><strong>{escape(entry.row.case)}</strong> "
        f"({escape(str(entry.row.kind))}): {escape(entry.row.reason or 'no reason recorded')}</li>"
        for entry in collection.entries
        if entry.row.by_pytorch
    ]
    text = f"<ul>{listed}</ul>" if listed else '<p class="note">Everyone asked for was timed.</p>'
    if own:
        text += (
            f"<details><summary>{len(own)} rows run PyTorch’s own operator: why</summary>"
            f"<ul>{''.join(own)}</ul></details>"
        )
    return text


def method(collection: Collection) -> str:
    on_gpu = any(source.device == "cuda" for source in collection.sources)
    gpu = (
        "On a GPU each call is timed by CUDA events, after the L2 cache was overwritten and with "
        "the launch hidden behind that. "
        if on_gpu
        else ""
    )
    return (
        "<p>Every row was compared with float64 before it was timed; a wrong result is never "
        "timed. The contenders take turns, so that a machine that slows down slows all of them. "
        f"{gpu}Times are medians; within {EVEN:.0%} of each other they are called even. "
        "Backward is the gradients of input, weight and bias together, and counts as twice the "
        "work and the traffic of forward. “channels_last” among the contenders gets its tensors "
        "in that layout and does not pay for the conversion. Rows marked “PyTorch’s own operator” "
        "are those where upconv hands the call to PyTorch: their times differ by chance and by "
        "the cost of deciding.</p>"
        "<p>Made by <code>upconv report</code> from files of <code>upconv bench --out</code>.</p>"
    )
