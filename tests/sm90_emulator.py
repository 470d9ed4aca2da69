"""The Hopper kernel in numpy: reads the plan's integers as the kernel does, and nothing else.

It follows csrc/cuda/sm90_wgmma_fprop.cuh step by step (fill of the tile, packed weights, one
product per pair, where each column is stored), so that tap tables, packing layout and tile
arithmetic are tested on a machine without a GPU.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

HEADER = Path(__file__).resolve().parent.parent / "upconv" / "csrc" / "cuda" / "sm90_params.h"
ROWS = 64


def header_fields() -> list[str]:
    """The scalar fields in the order of the C++ header."""
    return re.findall(r"^\s+X\((\w+)\)", HEADER.read_text(), re.MULTILINE)


def header_constant(name: str) -> int:
    found = re.search(rf"constexpr int {name} = (\d+);", HEADER.read_text())
    assert found, name
    return int(found.group(1))


class Plan:
    def __init__(self, record: tuple[int, ...]) -> None:
        values = iter(record)
        names = header_fields()
        self.field = {name: next(values) for name in names}
        folds, blocks = header_constant("kMaxFolds"), header_constant("kMaxBlocks")

        def take(count: int) -> list[int]:
            return [next(values) for _ in range(count)]

        self.kinds = [
            {"first_x": next(values), "first_y": take(folds), "range": take(2)}
            for _ in range(self.field["kinds"])
        ]
        self.pairs = [
            {"offset": next(values), "block": next(values), "tap": take(folds)}
            for _ in range(self.field["pairs"])
        ]
        self.jobs = [
            {
                "kind": take(blocks),
                "channel": take(blocks),
                "weights": next(values),
                "steps": next(values),
                "interleave": next(values),
                "columns": next(values),
            }
            for _ in range(self.field["jobs"])
        ]
        assert next(values, None) is None, "integers left over"

    def __getattr__(self, name: str) -> int:
        return self.field[name]


def steps(begin: int, end: int) -> list[range]:
    """The pairs of each weight block: fours, then what is left as a two and a one."""
    whole = begin + (end - begin) // 4 * 4
    result = [range(i, i + 4) for i in range(begin, whole, 4)]
    if (end - whole) & 2:
        result.append(range(whole, whole + 2))
    if (end - whole) & 1:
        result.append(range(end - 1, end))
    return result


def pack(plan: Plan, weight: np.ndarray) -> np.ndarray:
    """(Cin, Cout, taps) -> [weight block, K of 4 pairs, 64 rows] in the kernel's order."""
    elements = 4 if plan.operand == 0 else 8
    flat = weight.reshape(-1)
    blocks: list[np.ndarray] = []
    for job in plan.jobs:
        assert job["weights"] == len(blocks)
        for piece in range(plan.slices):
            parts = [
                (part, job["channel"][j])
                for j in range(plan.job_blocks)
                for part in steps(*plan.kinds[job["kind"][j]]["range"])
            ]
            assert len(parts) == job["steps"]
            for part, channel in parts:
                block = np.zeros((4 * 2 * elements, ROWS))
                for k, pair in enumerate(plan.pairs[i] for i in part):
                    for row in range(ROWS):
                        tap = pair["tap"][row // plan.fold_rows]
                        out = channel + row % plan.fold_rows
                        first = (piece * plan.slice_blocks + pair["block"]) * elements
                        for e in range(2 * elements):
                            if (
                                tap >= 0
                                and out < plan.out_channels
                                and first + e < plan.in_channels
                            ):
                                index = (first + e) * plan.weight_in + out * plan.weight_out + tap
                                block[k * 2 * elements + e, row] = flat[index]
                blocks.append(block)
    return np.array(blocks)


def fill(plan: Plan, x: np.ndarray, o: int, y: int, q: int, piece: int) -> np.ndarray:
    """One slice of the tile, [channel block, pixel, channel of the block]; NaN where unfilled."""
    elements = 4 if plan.operand == 0 else 8
    assert (plan.pitch % 4, plan.pixels % 4) == (0, 0), "items are 4 pixels of a row"
    if not plan.channels_last and plan.copy == 0:
        starts = ((q + plan.shift_x) % 4, plan.in_w % 4)
        assert starts == (0, 0), "whole vectors start on multiples of 4"
    if plan.copy == 1 and plan.operand:
        starts = ((q + plan.shift_x) % 2, plan.in_w % 2)
        assert starts == (0, 0), "4 bytes are two pixels"
    if plan.copy == 3:
        return fill_from_boxes(plan, x, (o, y, q), piece, elements)
    tile = np.full((plan.slice_blocks, plan.plane + 256, elements), np.nan)
    for pixel in range(plan.pixels):
        row, column = divmod(pixel, plan.pitch)
        image, row = divmod(row, plan.rows)
        lane, image = divmod(image, plan.tile_o)
        lane_y, lane_x = divmod(lane, plan.in_step_x)
        iy = (y + row) * plan.in_step_y + lane_y + plan.shift_y
        ix = (q + column) * plan.in_step_x + lane_x + plan.shift_x
        tile[:, pixel] = 0
        if lane_y >= plan.in_step_y or o + image >= plan.batch:
            continue
        if not (0 <= iy < plan.in_h and 0 <= ix < plan.in_w):
            continue
        first = piece * plan.slice_blocks * elements
        channels = x[o + image, first : first + plan.slice_blocks * elements, iy, ix]
        values = np.zeros(plan.slice_blocks * elements)
        values[: len(channels)] = channels
        tile[:, pixel] = values.reshape(plan.slice_blocks, elements)
    return tile


def fill_from_boxes(
    plan: Plan, x: np.ndarray, where: tuple[int, int, int], piece: int, elements: int
) -> np.ndarray:
    """The same through TMA boxes: one channel block of the tile each, zeros outside the image."""
    assert not plan.channels_last
    assert plan.in_w % elements == 0, "rows of the tensor start on 16 bytes"
    assert plan.raw_w % elements == 0, "rows of a box are whole 16 bytes"
    assert max(plan.raw_w, plan.raw_h, plan.tile_o) <= 256
    size = plan.raw_w * plan.raw_h * plan.tile_o * plan.raw_blocks * 16
    assert plan.slice_blocks % plan.raw_blocks == 0
    assert size <= plan.raw_bytes
    assert plan.raw_bytes % 128 == 0
    assert plan.raw_chunks >= 2
    o, y, q = where[0], where[1] * plan.in_step_y + plan.shift_y, where[2] * plan.in_step_x
    q += plan.shift_x
    late = q % elements  # boxes begin on 16 bytes
    q -= late
    assert plan.operand == 0 or late % 2 == 0, "two pixels of 16 bits are read together"
    tile = np.full((plan.slice_blocks, plan.plane + 256, elements), np.nan)
    margin = 300
    padded = np.pad(x, ((0, plan.tile_o), (0, 64 * elements), (margin, margin), (margin, margin)))
    for block in range(plan.slice_blocks):
        within = block % plan.raw_blocks
        channel = (piece * plan.slice_blocks + block - within) * elements
        channels = plan.raw_blocks * elements
        box = np.zeros((plan.tile_o, channels, plan.raw_h, plan.raw_w))
        part = padded[
            o : o + plan.tile_o,
            channel : channel + channels,
            y + margin : y + margin + plan.raw_h,
            q + margin : q + margin + plan.raw_w,
        ]
        box[: part.shape[0], : part.shape[1]] = part
        flat = box.reshape(-1)
        for pixel in range(plan.pixels):
            row, column = divmod(pixel, plan.pitch)
            image, row = divmod(row, plan.rows)
            lane, image = divmod(image, plan.tile_o)
            at = (image * channels + within * elements) * plan.raw_h + row * plan.in_step_y + lane
            for e in range(elements):
                index = (at + e * plan.raw_h) * plan.raw_w + column + late
                assert column + late < plan.raw_w
                tile[block, pixel, e] = flat[index] if lane < plan.in_step_y else 0
    return tile


def run(record: tuple[int, ...], x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The output; every element that no store reaches stays NaN, every double store is an error."""
    plan = Plan(record)
    elements = 4 if plan.operand == 0 else 8
    packed = pack(plan, weight)
    y = np.full((plan.batch, plan.out_channels, plan.out_h, plan.out_w), np.nan)
    written = np.zeros(y.shape, dtype=int)
    for o in range(0, plan.tiles_o * plan.tile_o, plan.tile_o):
        for row in range(0, plan.tiles_y * plan.tile_h, plan.tile_h):
            for column in range(0, plan.tiles_x * plan.tile_w, plan.tile_w):
                tiles = [fill(plan, x, o, row, column, s) for s in range(plan.slices)]
                for unit in range(plan.groups):
                    for index in [unit] if plan.alternate else [2 * unit, 2 * unit + 1]:
                        job = plan.jobs[index]
                        d = accumulate(plan, job, tiles, packed, elements)
                        store(plan, job, d, (o, row, column), bias, y, written)
    assert written.max() <= 1, "an output was stored twice"
    check_vectors(plan)
    return y


def check_vectors(plan: Plan) -> None:
    """A store of several elements stays in one output row, aligned, and skips no column."""
    if plan.vector == 1:
        return
    assert not plan.channels_last
    span = plan.out_step_x
    if span > 1:
        assert all(job["interleave"] and job["columns"] == (1 << span) - 1 for job in plan.jobs)
    for length in (plan.out_w, plan.tile_w * span, plan.pitch * span):
        assert length % plan.vector == 0


def accumulate(
    plan: Plan, job: dict[str, Any], tiles: list[np.ndarray], packed: np.ndarray, e: int
) -> np.ndarray:
    d = np.zeros((plan.job_blocks, ROWS, plan.tile_n))
    block = job["weights"]
    for tile in tiles:
        flat = tile[:, : plan.plane].reshape(-1, e)
        flat = np.concatenate([flat, np.full((4096, e), np.nan)])
        for j in range(plan.job_blocks):
            for part in steps(*plan.kinds[job["kind"][j]]["range"]):
                for k, i in enumerate(part):
                    first = plan.pairs[i]["offset"]
                    halves = [flat[first + h * plan.plane :][: plan.tile_n] for h in range(2)]
                    operand = np.concatenate(halves, axis=1)
                    weights = packed[block, k * 2 * e : (k + 1) * 2 * e]
                    d[j] += weights.T @ operand.T
                block += 1
    return d


def store(
    plan: Plan,
    job: dict[str, Any],
    d: np.ndarray,
    where: tuple[int, int, int],
    bias: np.ndarray,
    y: np.ndarray,
    written: np.ndarray,
) -> None:
    for n in range(plan.tile_n):
        row, column = divmod(n, plan.pitch)
        image, row = divmod(row, plan.rows)
        if column >= plan.tile_w or row >= plan.tile_h or image >= plan.tile_o:
            continue
        if where[0] + image >= plan.batch:
            continue
        for r in range(ROWS):
            fold, offset = divmod(r, plan.fold_rows)
            residues = {
                plan.kinds[job["kind"][j]]["first_x"]: (j, d[j, r, n])
                for j in range(plan.job_blocks)
            }
            if job["interleave"]:
                for residue in range(plan.out_step_x):
                    if job["columns"] >> residue & 1 and residue not in residues:
                        residues[residue] = (0, 0.0)
                places = [(x, j, v) for x, (j, v) in residues.items()]
            else:
                places = [
                    (plan.kinds[job["kind"][j]]["first_x"], j, d[j, r, n])
                    for j in range(plan.job_blocks)
                ]
            for first_x, j, value in places:
                channel = job["channel"][j] + offset
                first_y = plan.kinds[job["kind"][j]]["first_y"][fold]
                oy = (where[1] + row) * plan.out_step_y + first_y
                ox = (where[2] + column) * plan.out_step_x + first_x
                inside = oy < plan.out_h and ox < plan.out_w and channel < plan.out_channels
                if first_y < 0 or not inside:
                    continue
                y[where[0] + image, channel, oy, ox] = value + bias[channel]
                written[where[0] + image, channel, oy, ox] += 1
