"""The Hopper kernel in numpy: reads the plan's integers as the kernel does, and nothing else.

It follows csrc/cuda/sm90_wgmma_fprop.cuh step by step (fill of the tile, packed weights, one
product per pair, where each column is stored), so that tap tables, packing layout and tile
arithmetic are tested on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from params_header import ParamsHeader

header_fields = ParamsHeader("sm90_params.h").fields
header_constant = ParamsHeader("sm90_params.h").constant
ROWS = 64


class Plan:
    def __init__(self, record: tuple[int, ...]) -> None:
        values = iter(record)
        names = header_fields()
        self.field = {name: next(values) for name in names}
        blocks = header_constant("kMaxBlocks")

        def take(count: int) -> list[int]:
            return [next(values) for _ in range(count)]

        self.axes = [take(5) for _ in range(3)]
        self.row_first = take(self.field["row_phases"])
        self.column_first = take(self.field["width_phases"])
        self.kinds = [
            {"first_z": next(values), "row": next(values), "first_x": next(values)}
            for _ in range(self.field["kinds"])
        ]
        self.pairs = [
            {"offset": next(values), "block": next(values), "shift": take(3)}
            for _ in range(self.field["pairs"])
        ]
        self.visits = [
            {
                "lists": [[take(2) for _ in range(blocks)] for _ in range(2)],
                "steps": take(2),
                "plane": take(3),
            }
            for _ in range(self.field["visits"])
        ]
        self.jobs = [
            {
                "kind": take(blocks),
                "channel": take(blocks),
                "weights": next(values),
                "steps": next(values),
                "visit": next(values),
                "visits": next(values),
            }
            for _ in range(self.field["jobs"])
        ]
        assert next(values, None) is None, "integers left over"

    @property
    def elements(self) -> int:
        """Channels of a 16-byte block."""
        return 4 if self.operand == 0 else 8

    @property
    def whole(self) -> int:
        """Elements in 16 bytes of a tensor."""
        return 8 if self.operand in (1, 2) else 4

    def side(self, job: int) -> int:
        """Which of the two consumers' lists a job has in the table of visits."""
        return 0 if self.alternate else job % 2

    def unit_visits(self, job: int) -> list[dict[str, Any]]:
        first = self.jobs[job]["visit"]
        return self.visits[first : first + self.jobs[job]["visits"]]

    def row(self, job: dict[str, Any], j: int, r: int) -> tuple[int, tuple[int, int, int]] | None:
        """Output channel of row `r` of a job's block, and first depth, row and column of its phase;
        None for a row that holds nothing."""
        kind = self.kinds[job["kind"][j]]
        warp, within = divmod(r, 16)
        line, width_fold = divmod(within, self.width_folds)
        if line >= self.warp_lines:
            return None
        fold, channel = divmod(warp * self.warp_lines + line, self.fold_rows)
        channel += job["channel"][j]
        phase = j * self.width_folds + width_fold
        rows = self.row_first[kind["row"] :]
        depth_fold, row_fold = divmod(fold, self.row_folds)
        if fold >= self.folds or row_fold >= len(rows) or channel >= self.out_channels:
            return None
        first_z = kind["first_z"] + depth_fold * self.depth_apart
        if not self.width_phases:
            return channel, (first_z, rows[row_fold], kind["first_x"])
        if phase >= self.width_phases:
            return None
        return channel, (first_z, rows[row_fold], self.column_first[phase])

    def tap(self, firsts: tuple[int, int, int], shifts: list[int]) -> int:
        """Position in the weight of the tap that reads at `shifts` for a phase, -1 for none."""
        position = 0
        for first, shift, axis in zip(firsts, shifts, self.axes, strict=True):
            kernel, of_first, base, of_shift, step = axis
            k, rest = divmod(first * of_first + base - shift * of_shift, step)
            if rest or not 0 <= k < kernel:
                return -1
            position = position * kernel + k
        return position

    def __getattr__(self, name: str) -> int:
        return self.field[name]


def steps(pairs: list[int]) -> list[range]:
    """The pairs of each weight block: fours, then what is left as a two and a one."""
    begin, end = pairs[0], sum(pairs)
    whole = begin + (end - begin) // 4 * 4
    result = [range(i, i + 4) for i in range(begin, whole, 4)]
    if (end - whole) & 2:
        result.append(range(whole, whole + 2))
    if (end - whole) & 1:
        result.append(range(end - 1, end))
    return result


def weight_steps(plan: Plan, pairs: list[int]) -> list[tuple[range, int]]:
    """The pairs of each weight block, and which part of the weights meets which part of the input:
    0 heads that meet heads; 1 tails, 2 heads that meet tails, which come before in each piece of
    the list that is summed by itself."""
    if plan.parts == 1:
        return [(part, 0) for part in steps(pairs)]
    pieces = range(pairs[0], sum(pairs), plan.sum_pairs)
    return [
        (part, which)
        for first in pieces
        for which in (1, 2, 0)
        for part in steps([first, min(plan.sum_pairs, sum(pairs) - first)])
    ]


def pack(plan: Plan, weight: np.ndarray, group: int) -> np.ndarray:
    """The weight -> [weight block, K of 4 pairs, 64 rows] of one group, in the kernel's order."""
    elements = plan.elements
    flat = weight.reshape(-1)[group * plan.weight_group :]
    blocks: list[np.ndarray] = []
    for index, job in enumerate(plan.jobs):
        assert job["weights"] == len(blocks)
        c = plan.side(index)
        for visit in plan.unit_visits(index):
            parts = [
                (part, which, job, j)
                for j in range(plan.job_blocks)
                for part, which in weight_steps(plan, visit["lists"][c][j])
            ]
            assert len(parts) == visit["steps"][c]
            for piece in range(plan.slices):
                blocks += [pack_block(plan, flat, *part, piece, elements) for part in parts]
        assert job["steps"] == len(blocks) - job["weights"]
    assert plan.weight_blocks == len(blocks)
    return np.array(blocks)


def pack_block(
    plan: Plan,
    flat: np.ndarray,
    part: range,
    which: int,
    job: dict[str, Any],
    j: int,
    piece: int,
    elements: int,
) -> np.ndarray:
    block = np.zeros((4 * 2 * elements, ROWS))
    rows = [plan.row(job, j, r) for r in range(ROWS)]
    out = np.array([found[0] if found else 0 for found in rows])
    for k, pair in enumerate(plan.pairs[i] for i in part):
        taps = [plan.tap(found[1], pair["shift"]) if found else -1 for found in rows]
        tap = np.array(taps)
        assert (tap >= 0).any() or job["channel"][j] >= plan.out_channels, "multiplied for nothing"
        for e in range(2 * elements):
            channel_in = (piece * plan.slice_blocks + pair["block"]) * elements + e
            on = (tap >= 0) & (channel_in < plan.in_channels)
            index = channel_in * plan.weight_in + out * plan.weight_out + tap
            block[k * 2 * elements + e, on] = part_of(plan, flat[index[on]], which == 1)
    return block


def part_of(plan: Plan, values: np.ndarray, tail: bool) -> np.ndarray:
    """A number as the tensor core gets it: all of it, or the head or the tail of a split one."""
    if plan.parts == 1:
        return values
    # Where to cut is the kernel's affair; here so that the product of two tails does not count.
    head = values.astype(np.float32).astype(np.float64)
    return values - head if tail else head


@dataclass(frozen=True)
class Unit:
    o: int
    z: int
    y: int
    x: int
    group: int


def tile_pixels(plan: Plan) -> tuple[np.ndarray, ...]:
    """Lane, image, row and column of each pixel of the tile."""
    row, column = np.divmod(np.arange(plan.pixels), plan.pitch)
    column = column // plan.strip * 8 + column % plan.strip
    image, row = np.divmod(row, plan.rows)
    lane, image = np.divmod(image, plan.tile_o)
    return lane, image, row, column


def fill(plan: Plan, x: np.ndarray, where: Unit, plane: list[int], piece: int) -> np.ndarray:
    """One slice of the tile, [channel block, pixel, channel of the block]; NaN where unfilled.
    `x` is [image, group, channel, depth, row, column]."""
    elements = plan.elements
    together = plan.whole // 4 if plan.copy >= 3 else 4  # pixels that a loader takes at a time
    pitch = together if plan.flat else plan.pitch
    assert (pitch % together, plan.pixels % 4) == (0, 0), "items are pixels of a row"
    first_x = where.x * plan.in_step_x + plane[2]
    if not plan.channels_last and plan.copy == 0:
        starts = (first_x % 4, plan.in_w % 4, plan.in_step_x)
        assert starts == (0, 0, 1), "whole vectors start on multiples of 4"
    if plan.copy == 1 and plan.whole == 8:
        starts = (first_x % 2, plan.in_w % 2, plan.in_step_x)
        assert starts == (0, 0, 1), "4 bytes are two pixels"
    if plan.copy >= 3:
        values = fill_from_boxes(plan, x, where, plane, piece, elements)
    else:
        lane, image, row, column = tile_pixels(plan)
        iz = where.z * plan.in_step_z + plane[0]
        row_in = where.y * plan.lanes + row * plan.tile_lanes + lane
        iy = row_in * plan.in_step_y + plane[1]
        ix = (where.x + column) * plan.in_step_x + plane[2]
        on = (lane < plan.tile_lanes) & (where.o + image < plan.batch) & (0 <= iz < plan.in_d)
        on &= (iy >= 0) & (iy < plan.in_h) & (ix >= 0) & (ix < plan.in_w)
        first = piece * plan.slice_blocks * elements
        last = min(first + plan.slice_blocks * elements, plan.in_channels)
        values = np.zeros((plan.slice_blocks * elements, plan.pixels))
        if on.any():
            found = x[(where.o + image)[on], where.group, first:last, iz, iy[on], ix[on]]
            values[: last - first, on] = found.T
    parts = [part_of(plan, values, tail) for tail in (False, True)[: plan.parts]]
    blocks = np.concatenate(parts).reshape(-1, elements, plan.pixels)
    tile = np.full((len(blocks), plan.block_pitch + 256, elements), np.nan)
    tile[:, : plan.pixels] = blocks.transpose(0, 2, 1)
    return tile


def box(tensor: np.ndarray, at: list[int], size: list[int], steps: list[int]) -> np.ndarray:
    """A TMA box: every step-th position from `at` on, zeros outside the tensor."""
    result = np.zeros(size)
    spans = [range(a, a + n * s, s) for a, n, s in zip(at, size, steps, strict=True)]
    kept = [
        [i for i, v in enumerate(span) if 0 <= v < limit]
        for span, limit in zip(spans, tensor.shape, strict=True)
    ]
    if all(kept):
        taken = [[span[i] for i in keep] for span, keep in zip(spans, kept, strict=True)]
        result[np.ix_(*kept)] = tensor[np.ix_(*taken)]
    return result


def fill_from_boxes(
    plan: Plan, x: np.ndarray, where: Unit, plane: list[int], piece: int, elements: int
) -> np.ndarray:
    """[channel of the slice, pixel] through TMA boxes of some channel blocks each."""
    assert not plan.channels_last
    rows_apart = plan.copy == 4
    assert plan.flat <= rows_apart
    classes, channels = plan.raw_classes, plan.raw_blocks * elements
    assert (plan.in_channels % classes, elements % classes) == (0, 0)
    tensor = x.reshape(-1, *x.shape[2:])  # groups of all images
    if rows_apart:
        tensor = x.reshape(len(tensor), plan.in_channels // classes, 1, 1, -1)
    rows_bytes = np.cumprod(tensor.shape[:1:-1]) * 16 // plan.whole
    assert not (rows_bytes % 16).any(), "rows, depths and channels start on 16 bytes"
    assert plan.raw_w % plan.whole == 0, "rows of a box are whole 16 bytes"
    assert max(plan.raw_w, plan.raw_h, plan.raw_rows * plan.raw_step, plan.tile_o) <= 256
    assert plan.raw_step <= 8
    assert plan.conv_groups == 1 or plan.tile_o == 1
    assert plan.slice_blocks % plan.raw_blocks == 0
    check_raw_ring(plan)
    lane, image, row, column = tile_pixels(plan)
    on = lane < plan.tile_lanes
    pixel = image, row * plan.tile_lanes + lane, column * plan.in_step_x
    if plan.flat:
        assert (plan.tile_lanes, plan.in_step_y, plan.in_step_x) == (1, 1, 1)
        pixel = image, 0 * row, row * plan.pitch + column
    image, row, column = (each[on] for each in pixel)
    result = np.zeros((plan.slice_blocks * elements, plan.pixels))
    for first in range(0, plan.slice_blocks * elements, channels):
        channel = piece * plan.slice_blocks * elements + first
        boxes = row_boxes if rows_apart else tile_box
        loaded = boxes(plan, tensor, where, plane, channel)
        result[first : first + channels, on] = loaded[image, :, row, column].T
    return result


def check_raw_ring(plan: Plan) -> None:
    """Boxes land on 128 bytes and do not overlap."""
    boxes = min(plan.raw_residues, plan.raw_h) * plan.raw_classes
    assert plan.raw_rows * plan.raw_residues >= plan.raw_h
    block = plan.elements // plan.whole * 16
    of_one = plan.raw_w * plan.raw_rows * plan.tile_o * plan.raw_blocks * block // plan.raw_classes
    assert of_one <= plan.raw_stride
    assert (plan.raw_stride % 128, boxes * plan.raw_stride) == (0, plan.raw_bytes)
    assert plan.raw_chunks >= 2
    image = plan.rows * plan.pitch
    assert plan.whole == 4 or plan.tile_o == 1 or image % 2 == 0, "a pair is of one image"


def tile_box(
    plan: Plan, tensor: np.ndarray, where: Unit, plane: list[int], channel: int
) -> np.ndarray:
    """[image, channel, row, column] of a tile, as one box."""
    z = where.z * plan.in_step_z + plane[0]
    y, q = where.y * plan.lanes * plan.in_step_y + plane[1], where.x * plan.in_step_x + plane[2]
    late = q % plan.whole  # boxes begin on 16 bytes
    assert plan.whole == 4 or plan.in_step_x > 1 or late % 2 == 0, "16 bits are read in pairs"
    at = [where.o * plan.conv_groups + where.group, channel, z, y, q - late]
    size = [plan.tile_o, plan.raw_blocks * plan.elements, 1, plan.raw_h, plan.raw_w]
    assert (plan.raw_rows, plan.raw_step) == (plan.raw_h, plan.in_step_y)
    return box(tensor, at, size, [1, 1, 1, plan.in_step_y, 1])[:, :, 0, :, late:]


def row_boxes(
    plan: Plan, tensor: np.ndarray, where: Unit, plane: list[int], channel: int
) -> np.ndarray:
    """The same from a box for each residue of the rows and each class of channels."""
    classes, channels = plan.raw_classes, plan.raw_blocks * plan.elements
    z = where.z * plan.in_step_z + plane[0]
    y, q = where.y * plan.lanes * plan.in_step_y + plane[1], where.x * plan.in_step_x + plane[2]
    result = np.full((plan.tile_o, channels, plan.raw_h, plan.raw_w), np.nan)
    together = plan.in_d * plan.in_h * classes if plan.flat else 1 << plan.raw_shift
    grouped = tensor.reshape(*tensor.shape[:2], -1, 1, together * plan.in_w).swapaxes(2, 3)
    assert grouped.shape[-1] * 16 // plan.whole % 16 == 0, "groups of rows start on 16 bytes"
    for residue, of_class in product(range(min(plan.raw_residues, plan.raw_h)), range(classes)):
        row = (of_class * plan.in_d + z) * plan.in_h + y + residue * plan.in_step_y
        group = row >> plan.raw_shift
        run = (row - (group << plan.raw_shift)) * plan.in_w + q
        late = run % plan.whole
        apart = plan.whole == 4 or plan.in_step_x > 1 or plan.in_w % 2
        assert apart or late % 2 == 0, "16 bits are read in pairs"
        at = [where.o * plan.conv_groups + where.group, channel // classes, 0, group, run - late]
        if not 0 <= z < plan.in_d:
            at[1] = plan.in_channels
        size = [plan.tile_o, channels // classes, 1, plan.raw_rows, plan.raw_w]
        loaded = box(grouped, at, size, [1, 1, 1, plan.raw_step, 1])[:, :, 0, :, late:]
        wanted = result[:, of_class::classes, residue :: plan.raw_residues]
        wanted[..., : plan.raw_w - late] = loaded[:, :, : wanted.shape[2]]
    if not plan.flat:  # what lies beside a row is another row, and is overwritten
        column, row = q + np.arange(plan.raw_w), y + np.arange(plan.raw_h) * plan.in_step_y
        result[..., (column < 0) | (column >= plan.in_w)] = 0
        result[:, :, (row < 0) | (row >= plan.in_h)] = 0
    return result


def units(plan: Plan) -> Iterator[Unit]:
    """The tiles of every group, in the kernel's order."""
    sizes = plan.tiles_o, plan.tiles_z, plan.tiles_y, plan.tiles_x, plan.conv_groups
    for o, z, y, x, group in product(*map(range, sizes)):
        yield Unit(o * plan.tile_o, z, y * plan.tile_h, x * plan.tile_w, group)


def run(record: tuple[int, ...], x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The output; every element that no store reaches stays NaN, every double store is an error."""
    plan = Plan(record)
    elements = plan.elements
    shape = plan.batch, plan.conv_groups, plan.in_channels, plan.in_d, plan.in_h, plan.in_w
    x = x.reshape(shape)
    packed = [pack(plan, weight, group) for group in range(plan.conv_groups)]
    sizes = plan.out_d, plan.out_h, plan.out_w
    y = np.full((plan.batch, plan.conv_groups, plan.out_channels, *sizes), np.nan)
    written = np.zeros(y.shape, dtype=int)
    for where in units(plan):
        known: dict[tuple[int, ...], np.ndarray] = {}
        for index, job in enumerate(plan.jobs):
            tiles = []
            for visit, piece in product(plan.unit_visits(index), range(plan.slices)):
                key = *visit["plane"], piece
                if key not in known:
                    known[key] = fill(plan, x, where, visit["plane"], piece)
                tiles.append((visit["lists"][plan.side(index)], known[key]))
            d = accumulate(plan, job, tiles, packed[where.group], elements)
            store(plan, job, d, where, bias, y, written)
    fill_rows(plan, bias, y, written)
    assert written.max() <= 1, "an output was stored twice"
    assert len(plan.jobs) == plan.job_groups * (1 if plan.alternate else 2)
    check_vectors(plan)
    return y.reshape(plan.batch, -1, *sizes)


def check_vectors(plan: Plan) -> None:
    """A store of several elements stays in one output row, aligned, and skips no column."""
    if plan.vector == 1:
        return
    assert not plan.channels_last
    span = plan.out_step_x
    assert span == 1 or plan.width_phases or plan.paired
    for length in (plan.out_w, plan.tile_w * span, plan.row_columns * span):
        assert length % plan.vector == 0


def accumulate(
    plan: Plan,
    job: dict[str, Any],
    tiles: list[tuple[list[list[int]], np.ndarray]],
    packed: np.ndarray,
    e: int,
) -> np.ndarray:
    d = np.zeros((plan.job_blocks, ROWS, plan.tile_n))
    columns = np.arange(plan.tile_n)
    pixels = columns // 8 * plan.strip + columns % 8
    block = job["weights"]
    for lists, tile in tiles:
        flat = tile[:, : plan.block_pitch].reshape(-1, e)
        flat = np.concatenate([flat, np.full((256, e), np.nan)])
        for j in range(plan.job_blocks):
            for part, which in weight_steps(plan, lists[j]):
                for k, i in enumerate(part):
                    first = plan.pairs[i]["offset"]
                    first += (which == 2) * plan.slice_blocks * plan.block_pitch  # to the tails
                    ends = [flat[first + h * plan.block_pitch :] for h in (0, 1)]
                    operand = np.concatenate([end[pixels] for end in ends], axis=1)
                    weights = packed[block, k * 2 * e : (k + 1) * 2 * e]
                    d[j] += weights.T @ operand.T
                block += 1
    assert block == job["weights"] + job["steps"]
    return d


def store(
    plan: Plan,
    job: dict[str, Any],
    d: np.ndarray,
    where: Unit,
    bias: np.ndarray,
    y: np.ndarray,
    written: np.ndarray,
) -> None:
    row, column = np.divmod(np.arange(plan.tile_n), plan.row_columns)
    image, row = np.divmod(row, plan.rows)
    stored = (column < plan.tile_w) & (row < plan.tile_h) & (image < plan.tile_o)
    stored &= where.o + image < plan.batch
    for channel, firsts, values in stored_rows(plan, job, d):
        oz = where.z * plan.out_step_z + firsts[0]
        oy = (where.y + row) * plan.out_step_y + firsts[1]
        ox = (where.x + column) * plan.out_step_x + firsts[2]
        on = stored & (oy < plan.out_h) & (ox < plan.out_w)
        if oz < plan.out_d:
            at = (where.o + image)[on], where.group, channel, oz, oy[on], ox[on]
            y[at] = values[on] + bias[where.group * plan.out_channels + channel]
            written[at] += 1


def stored_rows(
    plan: Plan, job: dict[str, Any], d: np.ndarray
) -> Iterator[tuple[int, tuple[int, int, int], np.ndarray]]:
    """Output channel, first position and sums of each row that is stored; zeros for the width
    phases without taps that are stored with the others."""
    for j, r in product(range(plan.job_blocks), range(ROWS)):
        found = plan.row(job, j, r)
        if found is None:
            continue
        channel, firsts = found
        yield channel, firsts, d[j, r]
        if plan.width_phases and firsts[2] == plan.column_first[0]:
            for residue in set(range(plan.out_step_x)) - set(plan.column_first):
                yield channel, (*firsts[:2], residue), np.zeros(plan.tile_n)


def fill_rows(plan: Plan, bias: np.ndarray, y: np.ndarray, written: np.ndarray) -> None:
    """Depths and rows without taps."""
    z = np.arange(plan.out_d) % plan.out_step_z
    row = np.arange(plan.out_h) % (plan.out_step_y // plan.lanes)
    on = (plan.fill_z >> z & 1)[:, None] | (plan.fill_y >> row & 1)
    assert not plan.fill_first or on.any()
    each = bias.reshape(plan.conv_groups, plan.out_channels)
    y[:, :, :, on == 1] = each[None, :, :, None, None]
    written[:, :, :, on == 1] += 1
