"""The charts: speed-up bars, distance to the floor, rooflines."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..contenders import TITLES
from ..floor import Rates
from ..tables import batch_text, layer_text
from .entries import Collection, Entry
from .marks import Scale, attributes, line, mark, number, percent, swatch, text, times

BAR, GAP = 14, 4
"""Height of a bar and of the gap to the next, in pixels."""
HEIGHTS = {"torch": "32%", "benchmark": "68%", "channels_last": "32%", "compile": "68%"}
"""Of the peers' marks in a row, so that equal times are both seen; upconv's is in the middle."""


def tagged(entry: Entry) -> str:
    """The attributes that the filters look at, and what they count."""
    facets = {f"data_{name}": value for name, value in entry.facets.items()}
    return attributes(data_row="", **facets)


def label(entry: Entry, value: str = "") -> str:
    """Name, what the layer is, and the number that the chart shows."""
    row = entry.row
    words = "PyTorch’s operator"
    if row.partly_by_pytorch:
        words += " for one gradient"
    borrowed = row.by_pytorch or row.partly_by_pytorch
    tag = f'<span class="tag">{words}</span>' if borrowed else ""
    number_of_it = f'<span class="value">{value}</span>' if value else ""
    return (
        f'<div class="label"><span class="name">{escape(row.case)}</span>{number_of_it}'
        f'<span class="layer">{escape(layer_text(row))}, batch {batch_text(row)}</span>{tag}</div>'
    )


def group_words(group: tuple[str, str, str, str]) -> str:
    _, dtype, layout, direction = group
    return f"{direction.capitalize()}, {dtype}, {layout}"


def group_heading(group: tuple[str, str, str, str], machines: int) -> str:
    words = group_words(group) + (f" on {group[0]}" if machines > 1 else "")
    return f'<h3 class="group-heading">{escape(words)}</h3>'


def grid_lines(positions: Sequence[float], unit: float) -> str:
    lines = [
        line(percent(x), "0", percent(x), "100%", class_="grid one" if x == unit else "grid")
        for x in positions
    ]
    return "".join(lines)


def axis(ticks: Sequence[float], scale: Scale, left: str, right: str) -> str:
    """Ticks, and what it means to lie left or right of 1."""
    labels = [
        text(percent(scale(tick)), "27", f"{tick:g}×", class_="tick", text_anchor="middle")
        for tick in ticks
    ]
    one = percent(scale(1.0))
    if left:
        labels.append(text(one, "10", f"← {left}", class_="side", text_anchor="end", dx=-8))
    labels.append(text(one, "10", f"{right} →", class_="side", dx=8 if left else -4))
    return (
        '<div class="line axis" aria-hidden="true"><div class="label"></div>'
        f'<svg class="chart" height="32">{"".join(labels)}</svg></div>'
    )


def speed_up_chart(collection: Collection) -> str:
    """One bar for each peer: how many times upconv is faster, left of the line where it is not."""
    entries = [entry for entry in collection.entries if entry.peers and entry.row.correct]
    if not entries:
        return '<p class="note">No row was timed against PyTorch.</p>'
    ratios = [entry.row.speed_up(name) or 1.0 for entry in entries for name in entry.peers]
    scale = Scale(min(0.5, 0.9 * min(ratios)), max(2.0, *ratios), 3.0, 84.0)
    ticks = scale.doublings()
    places = [scale(tick) for tick in ticks]
    parts = [peer_legend(entries)]
    for group, some in collection.groups.items():
        shown = [entry for entry in some if entry in entries]
        if not shown:
            continue
        lines = "".join(speed_up_line(entry, scale, places) for entry in shown)
        heading = group_heading(group, len(collection.values("machine")))
        axis_line = axis(ticks, scale, "slower", "faster")
        parts.append(f'<section class="group" data-group>{heading}{axis_line}{lines}</section>')
    return "".join(parts)


def peer_legend(entries: Sequence[Entry]) -> str:
    names = [name for name in TITLES if any(name in entry.peers for entry in entries)]
    keys = [
        f'<li><svg class="swatch" width="22" height="12" aria-hidden="true">'
        f'<rect class="bar {name}" width="22" height="12" rx="2"/></svg>against {TITLES[name]}</li>'
        for name in names
    ]
    keys.append(
        '<li><svg class="swatch" width="22" height="12" aria-hidden="true"><rect class="bar torch '
        'hollow" x="1" y="1" width="20" height="10" rx="2"/></svg>PyTorch’s own operator runs</li>'
    )
    return f'<ul class="legend">{"".join(keys)}</ul>'


def speed_up_line(entry: Entry, scale: Scale, places: Sequence[float]) -> str:
    row = entry.row
    bars = []
    one = scale(1.0)
    for index, name in enumerate(entry.peers):
        ratio = row.speed_up(name) or 1.0
        at = scale(ratio)
        y = index * (BAR + GAP) + 3
        style = f"bar {name}{' hollow' if row.by_pytorch else ''}"
        left, wide = min(one, at), max(abs(at - one), 0.3)
        box = attributes(class_=style, x=percent(left), y=y, width=percent(wide), height=BAR, rx=2)
        slower = ratio < 0.995
        words = times(ratio) + (" slower" if slower else "")
        end = text(
            percent(max(one, at)),
            str(y + BAR / 2),
            words,
            class_="end slower" if slower else "end",
            dx=7,
            dominant_baseline="central",
        )
        title = f"{row.case} against {TITLES[name]}: {words}"
        bars.append(f"<rect{box}><title>{escape(title)}</title></rect>{end}")
    said = "; ".join(
        f"{times(row.speed_up(name) or 1.0)} as fast as {TITLES[name]}" for name in entry.peers
    )
    height = len(entry.peers) * (BAR + GAP) + 2
    return (
        f'<div class="line"{tagged(entry)}>{label(entry)}'
        f'<svg class="chart" height="{height}" role="img" aria-label="{escape(said)}">'
        f"{grid_lines(places, one)}{''.join(bars)}</svg></div>"
    )


def floor_chart(collection: Collection) -> str:
    """Dots: how many times the floor each contender takes."""
    entries = [e for e in collection.entries if e.row.floor_ms and "upconv" in e.row.times]
    if not entries:
        return '<p class="note">No file has a floor: files of older versions have none.</p>'
    distances = [1 / share for entry in entries for share in entry.row.share_of_floor.values()]
    scale = Scale(min(0.95, 0.95 * min(distances)), max(4.0, 1.1 * max(distances)), 3.0, 96.0)
    ticks = scale.ticks() if scale.high < 30 else scale.ticks((1, 3))
    places = [scale(tick) for tick in ticks]
    names = [name for name in TITLES if any(name in entry.row.times for entry in entries)]
    keys = "".join(f"<li>{swatch(name)}{TITLES[name]}</li>" for name in names)
    hollow = f"<li>{swatch('upconv', hollow=True)}upconv, PyTorch’s own operator runs</li>"
    parts = [f'<ul class="legend">{keys}{hollow}</ul>']
    for group, some in collection.groups.items():
        shown = [entry for entry in some if entry in entries]
        if not shown:
            continue
        lines = "".join(floor_line(entry, scale, places, names) for entry in shown)
        heading = group_heading(group, len(collection.values("machine")))
        axis_line = axis(ticks, scale, "", "further from the floor")
        parts.append(f'<section class="group" data-group>{heading}{axis_line}{lines}</section>')
    return "".join(parts)


def floor_line(entry: Entry, scale: Scale, places: Sequence[float], names: Sequence[str]) -> str:
    row = entry.row
    found = {name: 1 / share for name, share in row.share_of_floor.items()}
    ours = scale(found["upconv"])
    bits = [grid_lines(places, scale(1.0))]
    bits.append(line(percent(scale(1.0)), "50%", percent(ours), "50%", class_="reach"))
    # upconv last, so that it lies on top.
    for name in [name for name in names if name in found]:
        words = f"{row.case}, {TITLES[name]}: {times(found[name])} the floor"
        hollow = name == "upconv" and row.by_pytorch
        bits.append(
            mark(percent(scale(found[name])), HEIGHTS.get(name, "50%"), name, words, hollow)
        )
    said = "; ".join(f"{TITLES[name]} {times(value)} the floor" for name, value in found.items())
    return (
        f'<div class="line"{tagged(entry)}>{label(entry, times(found["upconv"]))}'
        f'<svg class="chart" height="26" role="img" aria-label="{escape(said)}">'
        f"{''.join(bits)}</svg></div>"
    )


def rooflines(collection: Collection) -> str:
    """A panel for each machine and dtype whose rates were measured."""
    panels: dict[tuple[str, str], list[Entry]] = {}
    for entry in collection.entries:
        if entry.row.floor_ms and entry.row.times and entry.row.kind.dtype in entry.source.rates:
            panels.setdefault((entry.source.machine, entry.row.kind.dtype), []).append(entry)
    if not panels:
        return '<p class="note">No file has the machine’s rates: older versions kept none.</p>'
    parts = [panel(machine, dtype, entries) for (machine, dtype), entries in panels.items()]
    keys = (
        f"<li>{swatch('upconv')}upconv</li><li>{swatch('torch')}PyTorch</li>"
        f"<li>{swatch('upconv', hollow=True)}upconv, PyTorch’s own operator runs</li>"
    )
    return (
        f'<ul class="legend">{keys}</ul><div class="panels">{"".join(parts)}</div>'
        '<p class="readout" aria-live="polite" data-readout>'
        "Point at a mark, tap it or move to it with the tab key to read it.</p>"
    )


def panel(machine: str, dtype: str, entries: Sequence[Entry]) -> str:
    rates = entries[-1].source.rates[dtype]
    peak, bandwidth = rates.flop_per_s / 1e12, rates.byte_per_s / 1e12
    intensities = [entry.row.problem.flops / entry.row.problem.bytes for entry in entries]
    speeds = [
        rate["tflop_per_s"]
        for entry in entries
        for name, rate in entry.row.rates.items()
        if name in ("torch", "upconv")
    ]
    across = Scale(min(intensities) / 2, max(*intensities, peak / bandwidth) * 2, 13.0, 97.0)
    up = Scale(min(speeds) / 1.5, max(*speeds, peak) * 1.6, 87.0, 6.0)
    bits = [roofline_grid(across, up), roof(across, up, rates)]
    bits += [roofline_point(entry, across, up) for entry in entries]
    heading = f"{dtype}: {number(peak)} TFLOP/s, {number(bandwidth)} TB/s"
    facets = attributes(data_machine=machine, data_dtype=dtype)
    return (
        f'<figure class="panel" data-panel{facets}><figcaption><strong>{escape(heading)}</strong>'
        f" measured on {escape(machine)}</figcaption>"
        f'<svg class="chart roofline" height="380" role="group" aria-label="Roofline, {dtype}">'
        f"{''.join(bits)}</svg></figure>"
    )


def roofline_grid(across: Scale, up: Scale) -> str:
    bits = []
    for tick in across.ticks((1,)):
        x = percent(across(tick))
        bits.append(line(x, percent(up.end), x, percent(up.start), class_="grid"))
        bits.append(text(x, "91.5%", f"{tick:g}", class_="tick", text_anchor="middle"))
    for tick in up.ticks((1,)) if up.high / up.low > 30 else up.ticks():
        y = percent(up(tick))
        bits.append(line(percent(across.start), y, percent(across.end), y, class_="grid"))
        bits.append(
            text(
                percent(across.start),
                y,
                f"{tick:g}",
                class_="tick",
                text_anchor="end",
                dx=-6,
                dominant_baseline="central",
            )
        )
    bits.append(text("55%", "98%", "FLOP per byte", class_="axis-title", text_anchor="middle"))
    bits.append(text("0", "3.4%", "TFLOP/s", class_="axis-title"))
    return "".join(bits)


def roof(across: Scale, up: Scale, rates: Rates) -> str:
    """The slope of the memory and the ceiling of the arithmetic, which meet at the ridge."""
    peak, bandwidth = rates.flop_per_s / 1e12, rates.byte_per_s / 1e12
    ridge = peak / bandwidth
    left = max(across.low, up.low / bandwidth)
    x0, y0 = percent(across(left)), percent(up(left * bandwidth))
    x1, y1 = percent(across(ridge)), percent(up(peak))
    ceiling = line(x1, y1, percent(across.end), y1, class_="roof")
    return line(x0, y0, x1, y1, class_="roof") + ceiling


def roofline_point(entry: Entry, across: Scale, up: Scale) -> str:
    row = entry.row
    x = percent(across(row.problem.flops / row.problem.bytes))
    rates = {name: row.rates[name] for name in ("torch", "upconv") if name in row.rates}
    heights = {name: percent(up(rate["tflop_per_s"])) for name, rate in rates.items()}
    said = f"{row.case}, {row.direction}, {row.kind.layout}: " + "; ".join(
        f"{TITLES[name]} {number(rate['tflop_per_s'])} TFLOP/s, {number(rate['tb_per_s'])} TB/s, "
        f"{row.share_of_floor[name]:.0%} of the floor"
        for name, rate in rates.items()
    )
    bits = []
    if len(heights) == 2:
        bits.append(line(x, heights["torch"], x, heights["upconv"], class_="reach"))
    for name, y in heights.items():
        bits.append(mark(x, y, name, hollow=name == "upconv" and row.by_pytorch))
    return (
        f'<g class="point" tabindex="0" role="img" aria-label="{escape(said)}"{tagged(entry)}>'
        f"<title>{escape(said)}</title>{''.join(bits)}</g>"
    )
