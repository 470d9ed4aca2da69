"""The CUDA-core kernel in numpy: reads the plan's integers as the kernel does, and nothing else.

It follows csrc/cuda/direct_fprop.cuh step by step (fill of the tile, order of the weights, one
product per offset, where each sum is stored), so that tables and tile arithmetic are tested on a
machine without a GPU.
"""

from __future__ import annotations

import re

import numpy as np
from params_header import CUDA, ParamsHeader

header_fields = ParamsHeader("direct_params.h").fields
header_constant = ParamsHeader("direct_params.h").constant


def compiled_tiles(name: str) -> dict[int, int]:
    """Rows and points of the instantiations in direct_launch.cuh; "FLOAT", "DOUBLE", "LONG"."""
    text = (CUDA / "direct_launch.cuh").read_text()
    line = re.search(rf"define UPCONV_DIRECT_{name}_TILES\(X\)(.*)", text)
    assert line
    return {int(rows): int(n) for rows, n in re.findall(r"X\((\d+), (\d+)\)", line.group(1))}


class Plan:
    def __init__(self, record: tuple[int, ...]) -> None:
        values = iter(record)
        self.field = {name: next(values) for name in header_fields()}

        def take(count: int) -> list[int]:
            return [next(values) for _ in range(count)]

        names = ("first_x", "columns", "firsts", "begin", "end", "taps")
        self.kind = [dict(zip(names, take(6), strict=True)) for _ in range(self.field["kinds"])]
        self.first = [take(2) for _ in range(self.field["firsts"])]
        self.offset = take(self.field["offsets"])
        self.tap = take(self.field["taps"])
        assert next(values, None) is None, "integers left over"
        name = "DOUBLE" if self.field["type"] == 1 else "FLOAT"
        tiles = compiled_tiles("LONG" if self.field["set_aside"] >= 0 else name)
        self.points = tiles[self.field["rows"]]

    def __getattr__(self, name: str) -> int:
        return self.field[name]

    @property
    def padded_rows(self) -> int:
        return -(-self.rows // 4) * 4 if self.rows > 2 else self.rows

    @property
    def weight_words(self) -> int:
        return (1 + self.chunk * self.most_taps) * self.padded_rows

    @property
    def tile_start(self) -> int:
        return -(-self.row_warps * self.weight_words // 4) * 4


def check_memory(plan: Plan) -> None:
    """Tile, weights and sums stay inside shared memory; points stay inside their channel."""
    taps = 2 * plan.row_warps * plan.most_taps * plan.folds * plan.width
    size = (plan.shared_bytes - -(-taps // 16) * 16) // (8 if plan.type == 1 else 4)
    points = plan.warps // plan.row_warps * plan.points * 32
    line = points * plan.width + (points * plan.width // 32 * 4 if plan.width == 8 else 0)
    stage = 0 if plan.straight else plan.row_warps * (plan.rows // plan.width) * line
    assert plan.warps * 32 <= header_constant("kDirectMaxThreads")
    assert plan.tile_start + max(plan.chunk * plan.channel, stage) <= size
    residues = plan.in_step_z * plan.in_step_y * plan.in_step_x
    assert plan.plane >= plan.slabs * plan.tile_rows * plan.pitch
    assert plan.channel >= residues * plan.plane
    used = ((plan.tile_z - 1) * plan.tile_rows + plan.tile_y - 1) * plan.pitch + plan.tile_x
    assert used <= points, "the tile has more points than the block has sums"
    assert all(o >= 0 and points + o <= plan.channel for o in plan.offset)
    assert residues * plan.plane < 1 << 22, "positions are divided in float"
    assert all(k["end"] - k["begin"] <= plan.most_taps for k in plan.kind)


def fill(plan: Plan, x: np.ndarray, first: tuple[int, int, int]) -> np.ndarray:
    """The tile of some channels, [channel, position]; NaN where nothing was written."""
    tile = np.full((len(x), plan.channel), np.nan)
    steps = (plan.in_step_z, plan.in_step_y, plan.in_step_x)
    shifts = (plan.shift_z, plan.shift_y, plan.shift_x)
    count = plan.slabs * plan.tile_rows * plan.pitch
    row, column = np.divmod(np.arange(count), plan.pitch)
    slab, row = np.divmod(row, plan.tile_rows)
    for residue in range(steps[0] * steps[1] * steps[2]):
        rest, bx = divmod(residue, steps[2])
        places = []
        for at, b, place, step, shift in zip(
            first, (*divmod(rest, steps[1]), bx), (slab, row, column), steps, shifts, strict=True
        ):
            places.append(at * step + shift + b + place * step)
        inside = np.ones(count, dtype=bool)
        for place, size in zip(places, x.shape[1:], strict=True):
            inside &= (place >= 0) & (place < size)
        values = np.zeros((len(x), count))
        values[:, inside] = x[(slice(None), *(place[inside] for place in places))]
        tile[:, residue * plan.plane : residue * plan.plane + count] = values
    return tile


def weights_of(plan: Plan, weight: np.ndarray, group: int, kind: dict[str, int], channel: int):
    """[input channel, offset, row] of one set of rows."""
    flat = weight.reshape(-1)
    phases, count = plan.folds * plan.width, kind["end"] - kind["begin"]
    result = np.zeros((plan.in_channels, count, plan.rows))
    for c in range(plan.in_channels):
        for k in range(count):
            for row in range(plan.rows):
                extra, phase = divmod(row, phases)
                tap = plan.tap[kind["taps"] + k * phases + phase]
                if tap >= 0 and channel + extra < plan.out_channels:
                    place = group * plan.weight_group + c * plan.weight_in + tap
                    result[c, k, row] = flat[place + (channel + extra) * plan.weight_out]
    return result


def run(record: tuple[int, ...], x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The output; every element that no store reaches stays NaN, every double store is an error."""
    plan = Plan(record)
    check_memory(plan)
    x = x.reshape(plan.batch, plan.groups, plan.in_channels, plan.in_d, plan.in_h, plan.in_w)
    shape = (plan.batch, plan.groups * plan.out_channels, plan.out_d, plan.out_h, plan.out_w)
    y, written = np.full(shape, np.nan), np.zeros(shape, dtype=int)
    units = plan.batch * plan.tiles_z * plan.tiles_y * plan.tiles_x
    for block in range(plan.groups * plan.row_blocks * plan.blocks):
        rest, unit = divmod(block, plan.blocks)
        group, row_block = divmod(rest, plan.row_blocks)
        sets = []
        for index in range(row_block * plan.row_warps, (row_block + 1) * plan.row_warps):
            number, part = divmod(index, plan.channel_blocks)
            if number < plan.kinds:
                channel = part * (plan.rows // (plan.folds * plan.width))
                kind = plan.kind[number]
                sets.append((kind, channel, weights_of(plan, weight, group, kind, channel)))
        lengths = [kind["end"] - kind["begin"] for kind, _, _ in sets]
        assert max(lengths) == lengths[0], "the first set of rows decides whether a tile is filled"
        for index in range(unit * plan.repeats, min((unit + 1) * plan.repeats, units)):
            compute(plan, index, group, sets, x, bias, y, written)
    assert written.max() <= 1, "an output was stored twice"
    return y


def compute(plan: Plan, index: int, group: int, sets, x, bias, y, written) -> None:
    index, tx = divmod(index, plan.tiles_x)
    index, ty = divmod(index, plan.tiles_y)
    image, tz = divmod(index, plan.tiles_z)
    first = (tz * plan.tile_z, ty * plan.tile_y, tx * plan.tile_x)
    points = plan.warps // plan.row_warps * plan.points * 32
    tile = fill(plan, x[image, group], first)
    for kind, channel, weights in sets:
        sums = np.zeros((plan.rows, points))
        for k, i in enumerate(range(kind["begin"], kind["end"])):
            inputs = tile[:, plan.offset[i] : plan.offset[i] + points]
            sums += weights[:, k].T @ inputs
        store(plan, kind, group, channel, sums, (image, *first), bias, y, written)


def store(plan: Plan, kind, group, channel, sums, where, bias, y, written) -> None:
    image, z0, y0, x0 = where
    channels = min(plan.rows // (plan.folds * plan.width), plan.out_channels - channel)
    # [channel, fold, point, width phase]: a row of points in the order of the output
    stage = sums.reshape(-1, plan.folds, plan.width, sums.shape[1]).swapaxes(2, 3)
    stage = stage.reshape(len(stage), plan.folds, -1)
    ox = x0 * plan.out_step_x + kind["first_x"]
    gapless = plan.width == plan.out_step_x
    begin = max(0, -ox) if gapless else 0
    end = min(plan.tile_x * plan.width, plan.out_w - ox) if gapless else plan.tile_x * plan.width
    stored = set()
    for group_of_lanes in range(32 // plan.row_lanes):
        stored |= set(range(group_of_lanes, plan.tile_z * plan.tile_y, 32 // plan.row_lanes))
    for row in stored:
        slab, tile_y = divmod(row, plan.tile_y)
        source = (slab * plan.tile_rows + tile_y) * plan.pitch * plan.width
        assert source % plan.vector == 0
        for fold in range(plan.folds):
            oz = (z0 + slab) * plan.out_step_z + plan.first[kind["firsts"] + fold][0]
            oy = (y0 + tile_y) * plan.out_step_y + plan.first[kind["firsts"] + fold][1]
            if not (0 <= oz < plan.out_d and 0 <= oy < plan.out_h):
                continue
            for e in range(begin, end, plan.vector):
                point, phase = divmod(e, plan.width)
                column = ox + (e if gapless else point * plan.out_step_x + phase)
                if not gapless and (phase >= kind["columns"] or not 0 <= column < plan.out_w):
                    continue
                assert column % plan.vector == 0, "a store starts on its own multiple"
                assert 0 <= column <= plan.out_w - plan.vector
                out = group * plan.out_channels + channel + np.arange(channels)
                place = (image, out, oz, oy)
                for v in range(plan.vector):
                    y[(*place, column + v)] = stage[:channels, fold, source + e + v] + bias[out]
                    written[(*place, column + v)] += 1
