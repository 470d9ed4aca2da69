"""The mma.sync kernel in numpy: reads the plan's integers as the kernel does, and nothing else.

It follows csrc/cuda/mma_fprop.cuh step by step (fill of the tile, packed weights, one product per
step and column tile, staging and stores), so that tap tables, packing layout and tile arithmetic
are tested on a machine without a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from params_header import ParamsHeader

header_fields = ParamsHeader("mma_params.h").fields
header_constant = ParamsHeader("mma_params.h").constant
KIND = (
    *("row_begin", "row_end", "phase_begin", "phase_end", "step_begin", "step_end"),
    *("stage_begin", "stage_end", "uniform", "taps", "prefill", "slice_tiles", "weights"),
)


class Plan:
    def __init__(self, record: tuple[int, ...]) -> None:
        values = iter(record)

        def take(names: tuple[str, ...]) -> dict[str, int]:
            return {name: next(values) for name in names}

        self.field = take(tuple(header_fields()))
        source = ("offset0", "offset1", "tiles", "shift0", "shift1", "block0", "block1", "first")
        self.kind = [take(KIND) for _ in range(self.kinds)]
        self.row = [take(("first_z", "first_y", "base")) for _ in range(self.rows)]
        self.phase_base = [next(values) for _ in range(self.phases)]
        self.step = [take(source) for _ in range(self.steps)]
        self.stage = [
            take(("first", "count", "step_begin", "step_end")) for _ in range(self.stages)
        ]
        self.tap = [next(values) for _ in range(self.taps)]
        assert next(values, None) is None, "integers left over"

    def __getattr__(self, name: str) -> int:
        return int(self.__dict__["field"][name])

    @property
    def slot_channels(self) -> int:
        return 4 if self.operand in (0, 3) else 8

    @property
    def tile_vectors(self) -> int:
        """16-byte vectors of one packed weight tile."""
        return 32 if self.operand == 3 else 16

    @property
    def warp_tiles(self) -> int:
        return 4 if self.operand == 3 else 8


def tiles_of(mask: int) -> list[int]:
    return [tile for tile in range(32) if mask >> tile & 1]


def pack(plan: Plan, weight: np.ndarray) -> np.ndarray:
    """Weight -> [weight tile, K of a step, 8 columns], in the kernel's order."""
    flat, e = weight.reshape(-1), plan.slot_channels
    units = plan.groups * plan.chunks * plan.slices
    total = max((k["weights"] + units * k["slice_tiles"] for k in plan.kind), default=0)
    packed = np.full((total, 2 * e, 8), np.nan)
    for kind in plan.kind:
        phases = kind["phase_end"] - kind["phase_begin"]
        for unit in range(units):
            group, chunk = divmod(unit // plan.slices, plan.chunks)
            piece = unit % plan.slices
            for step in plan.step[kind["step_begin"] : kind["step_end"]]:
                for place, tile in enumerate(tiles_of(step["tiles"])):
                    at = kind["weights"] + unit * kind["slice_tiles"] + step["first"] + place
                    assert np.isnan(packed[at]).all(), "packed twice"
                    packed[at] = 0
                    for n in range(8):
                        phase, c = column_of(plan, tile * 8 + n)
                        out = chunk * plan.chunk + c
                        if phase >= phases or c >= plan.chunk or out >= plan.out_channels:
                            continue
                        for half in range(2):
                            tap = plan.tap[kind["taps"] + step[f"shift{half}"] * phases + phase]
                            block = step[f"block{half}"]
                            if tap < 0 or block < 0:
                                continue
                            first = (piece * plan.slice_blocks + block) * e
                            for k in range(min(e, plan.in_channels - first)):
                                index = group * plan.weight_group + (first + k) * plan.weight_in
                                index += out * plan.weight_out + tap
                                packed[at, half * e + k, n] = flat[index]
    assert not np.isnan(packed).any(), "weights left out"
    return packed


def fill(plan: Plan, x: np.ndarray, at: tuple[int, ...], group: int, piece: int) -> np.ndarray:
    """One slice of the tile, [slot, channel of the slot]; NaN where unfilled."""
    e = plan.slot_channels
    o, z, y, q = at
    tile = np.full((plan.slice_blocks * plan.plane, e), np.nan)
    assert plan.copy in (1, 2, 4)
    for length in (q * plan.in_step_x + plan.shift_x, plan.fill_x, plan.in_w):
        assert length % plan.copy == 0, "so many pixels are read at a time"
    for index in np.ndindex(plan.tile_o, plan.fill_z, plan.fill_y, plan.fill_x):
        image, depth, row, column = index
        iz = z * plan.in_step_z + plan.shift_z + depth
        iy = y * plan.in_step_y + plan.shift_y + row
        ix = q * plan.in_step_x + plan.shift_x + column
        slot = image * plan.pitch_o + depth * plan.pitch_z + row * plan.pitch_y
        slot += column % plan.in_step_x * plan.lane_x + column // plan.in_step_x
        assert slot < plan.plane
        values = np.zeros(plan.slice_blocks * e)
        inside = 0 <= iz < plan.in_d and 0 <= iy < plan.in_h and 0 <= ix < plan.in_w
        if inside and o + image < plan.batch:
            first = piece * plan.slice_blocks * e
            last = min(first + plan.slice_blocks * e, plan.in_channels)
            start = group * plan.in_channels
            values[: last - first] = x[o + image, start + first : start + last, iz, iy, ix]
        places = np.arange(plan.slice_blocks) * plan.plane + slot
        assert np.isnan(tile[places]).all(), "two pixels share a slot"
        tile[places] = values.reshape(plan.slice_blocks, e)
    return tile


def pixel_slots(plan: Plan) -> np.ndarray:
    """Slot of each lattice point of the tile at shift 0; points past the end repeat the last."""
    count = plan.tile_o * plan.tile_z * plan.tile_y * plan.tile_x
    m = np.minimum(np.arange(plan.warps_m * plan.warp_pixels), count - 1)
    x, row = m % plan.tile_x, m // plan.tile_x
    y, z, o = row % plan.tile_y, row // plan.tile_y % plan.tile_z, row // plan.tile_y // plan.tile_z
    down = z * plan.in_step_z * plan.pitch_z + y * plan.in_step_y * plan.pitch_y
    return o * plan.pitch_o + down + x  # type: ignore[no-any-return]


def accumulate(
    plan: Plan, kind: dict[str, int], tiles: list[np.ndarray], packed: np.ndarray, unit: int
) -> np.ndarray:
    """[pixel, column], stage by stage as the weights travel."""
    columns = plan.warps_n * plan.warp_tiles * 8
    d = np.zeros((plan.warps_m * plan.warp_pixels, columns))
    slots = pixel_slots(plan)
    for piece, tile in enumerate(tiles):
        start = kind["weights"] + (unit * plan.slices + piece) * kind["slice_tiles"]
        expected = kind["step_begin"]
        for stage in plan.stage[kind["stage_begin"] : kind["stage_end"]]:
            assert stage["step_begin"] == expected
            assert stage["count"] * 16 <= plan.stage_bytes
            expected = stage["step_end"]
            masks = {s["tiles"] for s in plan.step[stage["step_begin"] : stage["step_end"]]}
            assert len(masks) == 1 or not kind["uniform"]
            at = start + stage["first"] // plan.tile_vectors
            first = at
            for step in plan.step[stage["step_begin"] : stage["step_end"]]:
                halves = [tile[slots + step[f"offset{h}"]] for h in range(2)]
                operand = np.concatenate(halves, axis=1)
                for t in tiles_of(step["tiles"]):
                    assert t * 8 < columns
                    d[:, t * 8 : t * 8 + 8] += operand @ packed[at]
                    at += 1
            assert (at - first) * plan.tile_vectors == stage["count"]
        assert expected == kind["step_end"]
    return d


def column_of(plan: Plan, column: int) -> tuple[int, int]:
    """Phase of the kind and channel of the chunk."""
    warp = column // (8 * plan.warp_tiles) if plan.spread else 0
    phase, channel = divmod(column - warp * 8 * plan.warp_tiles, plan.phase_columns)
    return phase, warp * plan.phase_columns + channel


def stage(plan: Plan, kind: dict[str, int], d: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Accumulators -> staging memory; `bias` is that of the chunk's channels."""
    rows = plan.tile_o * plan.tile_z * plan.tile_y
    size = 4 if plan.slot_channels == 4 else 2
    staging = np.full(plan.rows_at // size, np.nan)
    if kind["prefill"]:
        for row in plan.row[kind["row_begin"] : kind["row_end"]]:
            for c, value in enumerate(bias):
                first = row["base"] + c * plan.channel_pitch
                staging[first : first + rows * plan.segment] = value
    m = np.arange(rows * plan.tile_x)
    place = m // plan.tile_x * plan.segment + m % plan.tile_x * plan.out_step_x
    for column in range(plan.warps_n * plan.warp_tiles * 8):
        phase, c = column_of(plan, column)
        index = kind["phase_begin"] + phase
        if index < kind["phase_end"] and c < len(bias):
            first = plan.phase_base[index] + c * plan.channel_pitch
            assert np.isnan(staging[first + place]).all() or kind["prefill"]
            staging[first + place] = d[: len(m), column] + bias[c]
    return staging


def store(
    plan: Plan,
    kind: dict[str, int],
    staging: np.ndarray | None,
    at: tuple[int, ...],
    channel: int,
    bias: np.ndarray,
    y: np.ndarray,
) -> None:
    o, z, row0, q = at
    first_x = q * plan.out_step_x
    length = min(plan.segment, plan.out_w - first_x)
    assert (length % plan.vector, first_x % plan.vector, plan.out_w % plan.vector) == (0, 0, 0)
    assert plan.segment % plan.vector == 0
    for row in plan.row[kind["row_begin"] : kind["row_end"]]:
        for i, (image, dz, dy) in enumerate(np.ndindex(plan.tile_o, plan.tile_z, plan.tile_y)):
            oz = (z + dz) * plan.out_step_z + row["first_z"]
            oy = (row0 + dy) * plan.out_step_y + row["first_y"]
            if o + image >= plan.batch or oz >= plan.out_d or oy >= plan.out_h:
                continue
            for c, value in enumerate(bias):
                line = y[o + image, channel + c, oz, oy, first_x : first_x + length]
                assert np.isnan(line).all(), "an output was stored twice"
                if row["base"] < 0:
                    line[:] = value
                else:
                    assert staging is not None
                    first = row["base"] + c * plan.channel_pitch + i * plan.segment
                    line[:] = staging[first : first + length]


def run(record: tuple[int, ...], x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Any:
    """The whole kernel; x is (N, C, D, H, W)."""
    plan = Plan(record)
    packed = pack(plan, weight)
    shape = (plan.batch, plan.groups * plan.out_channels, plan.out_d, plan.out_h, plan.out_w)
    y = np.full(shape, np.nan)
    tiles = (plan.tiles_o, plan.tiles_z, plan.tiles_y, plan.tiles_x)
    sizes = (plan.tile_o, plan.tile_z, plan.tile_y, plan.tile_x)
    for index in np.ndindex(*tiles):
        at = tuple(i * s for i, s in zip(index, sizes, strict=True))
        for group in range(plan.groups):
            slices = [fill(plan, x, at, group, s) for s in range(plan.slices)]
            for chunk in range(plan.chunks):
                first = group * plan.out_channels + chunk * plan.chunk
                count = min(plan.chunk, plan.out_channels - chunk * plan.chunk)
                values = bias[first : first + count]
                for kind in plan.kind:
                    staging = None
                    if kind["step_end"] > kind["step_begin"]:
                        unit = group * plan.chunks + chunk
                        d = accumulate(plan, kind, slices, packed, unit)
                        staging = stage(plan, kind, d, values)
                    store(plan, kind, staging, at, first, values, y)
    return y
