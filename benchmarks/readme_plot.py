"""Draws the README's plot from committed result files.

    python benchmarks/readme_plot.py FILE.json [FILE.json ...]     write docs/images/speed-up.svg
    python benchmarks/readme_plot.py --check                       exit 1 if its files have changed

The picture remembers its files and a digest of their rows; `make readme-plot` names the files.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from upconv.contenders import TITLES
from upconv.report.entries import Collection, Entry, geometric_mean, read_entries
from upconv.report.marks import times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/images/speed-up.svg"
INK, SOFT, GRID = "#1b2129", "#59636f", "#dfe2e6"
LAYOUT = "contiguous"
DTYPES = ("tf32", "bfloat16", "float16", "float32", "float64")
"""The panels from left to right."""
FASTER, SLOWER = "#0072b2", "#b3261e"
MEMORY = re.compile(r"drawn from (\[.*?\]) with digest ([0-9a-f]{64})")


def digest_of(paths: Sequence[Path]) -> str:
    """Of the rows alone: a file that is only written anew keeps it."""
    rows = [json.loads(path.read_text())["rows"] for path in paths]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def draw(paths: Sequence[Path]) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    collection = read_entries(paths)
    # The layout people use; the report shows the other one too.
    groups = [(group, some) for group, some in collection.groups.items() if group[2] == LAYOUT]
    groups.sort(key=lambda one: (one[0][3] != "forward", DTYPES.index(one[0][1])))
    cases = list(dict.fromkeys(entry.row.case for entry in collection.entries))
    with rc_context({"svg.hashsalt": "upconv", "font.family": "sans-serif", "font.size": 10}):
        figure = Figure(figsize=(1.7 + 3.1 * len(groups), 1.4 + 0.29 * len(cases)))
        panels = figure.subplots(1, len(groups), sharex=True, squeeze=False)[0]
        for panel, (group, entries) in zip(panels, groups, strict=True):
            draw_panel(panel, group, entries, cases)
        ratios = [entry.row.ratio or 1.0 for _, some in groups for entry in some]
        # Room for the numbers right of the longest bar.
        panels[0].set_xlim(min(0.5, 0.9 * min(ratios)), 1.9 * max(2.0, *ratios))
        panels[0].set_yticks(range(len(cases)), cases)
        for panel in panels[1:]:
            panel.set_yticks([])
        inch = 1 / figure.get_figheight()
        title = {"color": INK, "weight": "bold", "size": 11}
        figure.text(0.01, 1 - 0.08 * inch, heading(collection), va="top", **title)
        figure.text(0.01, 0.08 * inch, footnote(collection), va="bottom", color=SOFT, size=8.5)
        figure.tight_layout(rect=(0, 0.25 * inch, 1, 1 - 0.35 * inch))
        names = json.dumps([str(path.relative_to(ROOT)) for path in paths])
        memory = f"drawn from {names} with digest {digest_of(paths)}"
        PICTURE.parent.mkdir(exist_ok=True)
        figure.savefig(PICTURE, metadata={"Date": None, "Description": memory})


def draw_panel(
    panel: Axes, group: tuple[str, ...], entries: Sequence[Entry], cases: Sequence[str]
) -> None:
    """A bar for each layer, from 1x on a scale of doublings."""
    timed = {entry.row.case: entry for entry in entries if entry.row.ratio}
    mean = geometric_mean([entry.row.ratio or 1.0 for entry in timed.values()])
    _, dtype, _, direction = group
    panel.set_title(f"{direction}, {dtype}: {times(mean or 1.0)}", loc="left", color=INK, size=10)
    panel.set_xscale("log", base=2)
    for case, entry in timed.items():
        ratio = entry.row.ratio or 1.0
        color = FASTER if ratio >= 1 else SLOWER
        borrowed = entry.row.by_pytorch
        panel.barh(
            cases.index(case),
            ratio - 1,
            left=1,
            height=0.62,
            facecolor="white" if borrowed else color,
            edgecolor=color,
            linestyle=(0, (3, 2)) if borrowed else "solid",
            linewidth=1.0,
        )
        panel.annotate(
            times(ratio),
            (max(1.0, ratio), cases.index(case)),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=SLOWER if ratio < 0.995 else INK,
            size=8.5,
        )
    panel.set_ylim(len(cases) - 0.4, -0.6)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    panel.axvline(1, color=SOFT, linewidth=1.2)
    panel.grid(axis="x", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=SOFT, length=0)
    for label in panel.get_yticklabels():
        label.set_color(INK)
    for side in ("top", "right", "left", "bottom"):
        panel.spines[side].set_visible(False)


def heading(collection: Collection) -> str:
    names = [name for name in TITLES if any(name in e.peers for e in collection.entries)]
    peers = "PyTorch" if names == ["torch"] else "the fastest PyTorch setting"
    return f"Times as fast as {peers} on {', '.join(collection.values('machine'))}"


def footnote(collection: Collection) -> str:
    known = [source.environment for source in collection.sources]
    versions = ", ".join(dict.fromkeys(f"PyTorch {one['torch']}" for one in known))
    dates = ", ".join(dict.fromkeys(one["date"] for one in known))
    return (
        f"{versions}, {dates}. Dashed: PyTorch's own operator runs. Red: slower. "
        "Above each panel the geometric mean."
    )


def check() -> int:
    found = MEMORY.search(PICTURE.read_text().replace("&quot;", '"')) if PICTURE.exists() else None
    if found is None:
        print(f"{PICTURE.relative_to(ROOT)} does not say what it was drawn from: make readme-plot")
        return 1
    paths = [ROOT / name for name in json.loads(found[1])]
    if not all(path.exists() for path in paths) or digest_of(paths) != found[2]:
        print(f"{PICTURE.relative_to(ROOT)} is older than its result files: make readme-plot")
        return 1
    return 0


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        return check()
    if not arguments or any(word.startswith("-") for word in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    paths = [Path(word).resolve() for word in arguments]
    outside = [path for path in paths if not path.is_relative_to(ROOT)]
    if outside:
        print(f"{outside[0]} is not among this checkout's files", file=sys.stderr)
        return 2
    draw(paths)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
