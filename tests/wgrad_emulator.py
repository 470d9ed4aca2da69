"""The Hopper kernel for the weight's gradient in numpy: reads the plan's integers and nothing else.

It follows csrc/cuda/sm90_wgmma_wgrad.cuh step by step (copies into the ring, windows in registers,
vectors in shared memory, sums of all workers), so that tables, layout and walk are tested without a
GPU. Memory that was not written holds NaN.
"""

from __future__ import annotations

import numpy as np
from params_header import ParamsHeader

header_fields = ParamsHeader("sm90_wgrad_params.h").fields
header_constant = ParamsHeader("sm90_wgrad_params.h").constant
ROWS, WARP_ROWS, UNIT = 64, 16, 32


class Plan:
    def __init__(self, record: tuple[int, ...]) -> None:
        values = iter(record)
        self.field = {name: next(values) for name in header_fields()}

        def take(*names: str) -> dict[str, int]:
            return {name: next(values) for name in names}

        self.jobs = []
        for _ in range(self.field["jobs"]):
            names = ("shift_y", "extra_rows", "planes", "consumers", "workers")
            job: dict[str, object] = dict(take(*names))
            planes = [
                take("channel", "depth", "phase_y", "phase_x", "start", "sum")
                for _ in range(header_constant("kWgradPlanes"))
            ]
            job["plane"] = planes[: self.field["planes"]]
            names = ("plane", "back", "offset", "skew", "high", "count", "channel", "tap")
            job["run"] = [
                [take(*names) for _ in range(header_constant("kWgradWarps"))]
                for _ in range(header_constant("kWgradRuns"))
            ]
            self.jobs.append(job)
        assert next(values, None) is None, "integers left over"

    def __getattr__(self, name: str) -> int:
        return self.field[name]

    @property
    def element(self) -> int:
        return 4 if self.operand == 0 else 2

    @property
    def point(self) -> int:
        return 4 if self.pairs else self.element

    @property
    def in_order(self) -> bool:
        return self.element == 2 and not self.pairs

    @property
    def apart(self) -> int:
        """Points from one tap of a run to the next."""
        return 2 if self.odd == 3 else 1

    @property
    def single(self) -> bool:
        """Pairs with single taps."""
        return bool(self.pairs) and self.run == 1

    @property
    def woven(self) -> bool:
        return not (self.in_order or self.single)


def units(plan: Plan, workers: int, worker: int) -> list[tuple[int, int, int, int]]:
    """(image, row, column, rows) of every unit of a worker."""
    total = plan.image_groups * plan.strips * plan.in_h
    at, end = total * worker // workers, total * (worker + 1) // workers
    result = []
    while at < end:
        strip, row = divmod(at, plan.in_h)
        rows = min(end - at, plan.in_h - row)
        group, strip = divmod(strip, plan.strips)
        result.append((group * plan.images, row, strip * plan.segment, rows))
        at += rows
    return result


def slice_of(plan: Plan, image: int) -> tuple[int, int] | None:
    """Image of the batch and slice along the depth, where they exist."""
    n, z = divmod(image, plan.in_d)
    return (n, z) if n < plan.batch else None


def fill_input(plan: Plan, x: np.ndarray, where: tuple[int, int, int], channel: int) -> np.ndarray:
    """[unit, vector, channel, t, element of a word]"""
    image, row, column = where
    pixels, per_word = plan.segment * plan.images, 4 // plan.element
    vectors = UNIT * plan.element // 16
    words = pixels // per_word
    if plan.slab:
        assert plan.copy == 0, "the TMA brings both or none"
        assert plan.segment * plan.element % plan.slab == 0
        assert plan.in_w * plan.element % 16 == 0
        assert plan.stage_bytes % 1024 == 0
        assert plan.input_bytes == pixels * plan.element * plan.tile_n
    squares = plan.woven and plan.copy_input >= 8
    items = pixels * plan.element // (64 if squares else max(plan.copy_input, 4))
    assert plan.slab or items <= (16 if squares else 128), "a thread has one copy of a row"
    assert plan.copy_input == 2 or plan.in_w * plan.element % plan.copy_input == 0
    result = np.full((pixels // UNIT, vectors, plan.tile_n, 4, per_word), np.nan)
    for word in range(words):
        i, c = divmod(word * per_word, plan.segment)
        unit, inside = divmod(word, UNIT // per_word)
        for e in range(per_word):
            values = np.zeros(plan.tile_n)
            found = slice_of(plan, image + i)
            if found and column + c + e < plan.in_w:
                some = x[found[0], channel : channel + plan.tile_n, found[1], row, column + c + e]
                values[: len(some)] = some
            vector, t = inside % vectors, inside // vectors
            if plan.spread == 2 and not plan.odd:  # each half of the unit by itself
                vector, t = inside // 16 * 4 + inside % 4, inside % 16 // 4
            if not plan.woven:
                vector, t = inside // 4, inside % 4
            result[unit, vector, :, t, e] = values
    return result


def check_copy(plan: Plan, i: int, point: int, x: int) -> None:
    """The copy that brings a point is aligned on both sides and ends with the row."""
    per_copy = plan.copy // plan.point
    assert plan.step_x * plan.element == plan.point or per_copy == 1
    first = x - point % per_copy * plan.step_x
    assert first * plan.element % plan.copy == 0 or per_copy == 1
    assert plan.out_w * plan.element % plan.copy == 0
    place = i * plan.segment_pitch + point // per_copy * per_copy
    assert place * plan.point % plan.copy == 0
    assert plan.pitch * plan.point % plan.copy == 0


def fill_plane(
    plan: Plan, gy: np.ndarray, job: dict, index: int, where: tuple[int, int, int]
) -> tuple[int, np.ndarray]:
    """Where the plane begins, and [point, phase of a point]: 16-bit pairs have two phases.

    Channels are `pitch` points apart.
    """
    image, row, column = where
    plane = job["plane"][index]
    phases = 2 if plan.pairs and plan.element == 2 else 1
    tile = np.full((plan.plane_bytes // plan.point + 32, phases), np.nan)
    if plan.copy == 0:
        return fill_boxes(plan, gy, plane, where, tile)
    per_copy = max(max(plan.copy, 4) // plan.point, 1)
    strip = plan.segment * plan.spread
    assert plan.filled % per_copy == 0
    assert strip % per_copy == 0
    most = max(strip, plan.filled - strip)
    assert plan.images * most // per_copy <= 128, "a thread has one copy of a row"
    for i in range(plan.images):
        for point in range(plan.filled):
            y = row * plan.step_y + plane["phase_y"]
            x = (column * plan.spread + plane["start"] + point) * plan.step_x + plane["phase_x"]
            if plan.copy > 2:
                check_copy(plan, i, point, x)
            inside = 0 <= x < plan.out_w
            x -= x % phases
            for phase in range(phases):
                values = np.zeros(plan.rows)
                found = slice_of(plan, image + i)
                z = found[1] * plan.step_z + plane["depth"] if found else -1
                if inside and found and 0 <= y < plan.out_h and 0 <= z < plan.out_d:
                    channel = plane["channel"]
                    some = gy[found[0], channel : channel + plan.rows, z, y, x + phase]
                    values[: len(some)] = some
                places = np.arange(plan.rows) * plan.pitch + i * plan.segment_pitch + point
                tile[places, phase] = values
    return 0, tile


def fill_boxes(
    plan: Plan, gy: np.ndarray, plane: dict, where: tuple[int, int, int], tile: np.ndarray
) -> tuple[int, np.ndarray]:
    """The same by the TMA: a box for each image, zeros beyond the tensor."""
    image, row, column = where
    whole = [(), (1,), (1, 1)][plan.flat]
    points = gy.reshape(*gy.shape[: 4 - plan.flat], *whole, -1, tile.shape[1])
    assert plan.flat == 2 or plan.classes == 1
    step = gy[0, 0].size * plan.classes if plan.flat == 2 else points[0, 0, 0, 0].size
    assert step * plan.element % 16 == 0, "the TMA wants 16 bytes"
    boxes = (1 if plan.together else plan.images) * plan.classes
    assert plan.plane_bytes // boxes % 128 == 0
    assert plan.plane_bytes == plan.rows * plan.point * plan.pitch * boxes // plan.classes
    assert plan.input_bytes % 128 == 0
    assert plan.filled <= 256
    assert plan.filled * plan.point % 16 == 0
    assert plan.pitch == plan.filled * (plan.images if plan.together else 1)
    y = row * plan.step_y + plane["phase_y"]
    line = plan.out_w * plan.element // plan.point
    lates = set()
    for i in range(plan.images):
        n, z = divmod(image + i, plan.in_d)
        z = z * plan.step_z + plane["depth"]
        begin = column * plan.spread + plane["start"]
        begin += [0, y, y + z * plan.out_h][plan.flat] * line
        for smem_row in range(plan.rows):
            c = channel_of_row(plan, plane["channel"] + smem_row)
            # Of a class as one: the channels before it, in front.
            start = begin + (c % plan.classes) * plan.out_d * plan.out_h * line
            late = start * plan.point % 16 // plan.point
            outside = not (0 <= y < plan.out_h and 0 <= z < plan.out_d)
            lates.add((late - later(plan, smem_row)) % (16 // plan.point))
            assert plan.flat or late == 0, "a box that does not begin on 16 bytes"
            place = i * plan.segment_pitch + smem_row * plan.pitch
            box = np.zeros((plan.filled, tile.shape[1]))
            where_to = (n, c, 0 if plan.flat == 2 else z, 0 if plan.flat else y)
            if all(0 <= a < size for a, size in zip(where_to, points.shape[:4], strict=True)):
                there = points[where_to]
                if plan.flat == 2:
                    first = c // plan.classes * plan.classes
                    there = points[n, first : first + plan.classes].reshape(-1, tile.shape[1])
                keep = [k for k in range(plan.filled) if 0 <= start - late + k < len(there)]
                box[keep] = there[[start - late + k for k in keep]]
            if plan.odd:
                clear_edges(plan, box, column * plan.spread + plane["start"], late)
                box[:] = 0 if outside else box
            tile[place : place + plan.filled] = box
    assert len(lates) == 1, "images and classes begin at places that the consumers do not expect"
    return lates.pop(), tile


def clear_edges(plan: Plan, box: np.ndarray, column: int, late: int) -> None:
    """What of a box lies beside its row, of which it begins with this column."""
    end = late + plan.filled - 7
    box[late : max(late, min(late - column, end))] = 0
    box[max(late, late + plan.out_w - column) : end] = 0


def channel_of_row(plan: Plan, row: int) -> int:
    """Channels of a plane lie one class after the other."""
    block, inside = divmod(row, ROWS)
    k, within = divmod(inside, plan.rows // plan.classes)
    return block * ROWS + within * plan.classes + k


def later(plan: Plan, row: int) -> int:
    """How many points later in its 16 bytes a class begins than the first one."""
    volume = plan.out_d * plan.out_h * plan.out_w * plan.element // plan.point
    return row % ROWS // (plan.rows // plan.classes) * volume % (16 // plan.point)


def multiply(
    plan: Plan, chunk: np.ndarray, plane: tuple[int, np.ndarray], run: dict, tap: int
) -> np.ndarray:
    """[grad_output channel of a warp, input channel] of one tap and one chunk."""
    total = np.zeros((WARP_ROWS, plan.tile_n))
    pieces = plan.segment // 8
    first = run["channel"] % ROWS
    late, tile = plane
    rows = (first + np.arange(WARP_ROWS)) * plan.pitch
    if plan.odd:  # each row begins at a place of its own
        rows += [(late + later(plan, first + row)) % 8 for row in range(WARP_ROWS)]
        late, tap = 0, tap * plan.apart
    late = (late + later(plan, first)) % (16 // plan.point) if plan.flat and not plan.odd else late
    steps, vectors = (4, 8) if plan.element == 4 else (2, 4)
    for unit in range(chunk.shape[0]):
        for t in range(4):
            i, piece = divmod(4 * unit + t, pieces)
            base = i * plan.segment_pitch + piece * 8 * plan.spread + run["offset"]
            assert base % (2 if plan.in_order else 4) == 0, "windows are read in vectors"
            base += run["skew"] + late
            for m in range(steps):
                for h in range(2):
                    for e in range(4 // plan.element):
                        if plan.single:  # pixel 2 t + e or t of the instruction's pieces
                            inside = 8 * h + 2 * t + e if plan.element == 2 else 4 * h + t
                            i, column = divmod(
                                UNIT * unit + 32 // plan.element * m + inside, plan.segment
                            )
                            base = i * plan.segment_pitch + run["offset"] + run["skew"] + late
                            point = base + column * plan.spread
                        elif plan.spread == 2 and not plan.odd:
                            i, piece = divmod(4 * unit + 2 * h + t // 2, pieces)
                            base = i * plan.segment_pitch + piece * 16 + t % 2 * 8
                            base += run["offset"] + run["skew"] + late
                            point = base + 2 * m + tap
                        elif plan.element == 4:
                            point = base + m + 4 * h + tap
                        else:
                            point = base + 2 * (m + 2 * h) + e + tap
                        vector = m + vectors // 2 * h
                        if plan.single:
                            word, within = divmod(
                                (32 // plan.element * m + inside), 4 // plan.element
                            )
                            b = chunk[unit, word // 4, :, word % 4, within]
                        elif plan.in_order:  # `t` counts pieces here, words inside them below
                            word, vector = 2 * (m % 2) + h, t
                            point = base + (2 * word + e) * plan.spread + tap
                            b = chunk[unit, vector, :, word, e]
                        else:
                            b = chunk[unit, vector, :, t, e]
                        turn = run["high"] if run["high"] < 2 else (run["high"] + point - base) % 2
                        total += np.outer(tile[rows + point, turn], b)
    return total


def run(record: tuple[int, ...], x: np.ndarray, gy: np.ndarray) -> np.ndarray:
    """The gradient [Cin, Cout of a group, tap]; what no run stores is NaN, twice is an error."""
    plan = Plan(record)
    gw = np.full((plan.in_channels, plan.out_channels, plan.taps), np.nan)
    banks = (8, 4) if plan.woven else (16, 8)
    assert plan.together or plan.odd or plan.pitch % banks[0] == banks[1], "rows would share banks"
    assert plan.images * plan.segment_pitch <= plan.pitch or plan.copy == 0
    for job in plan.jobs:
        for block in range(plan.channel_blocks):
            sums: dict[tuple[int, int, int], np.ndarray] = {}
            assert job["workers"] >= plan.workers
            for worker in range(job["workers"]):
                walk(plan, job, block * plan.tile_n, worker, x, gy, sums)
            store(plan, job, block * plan.tile_n, sums, gw)
    groups = zip(
        np.split(gw, plan.in_channels // plan.in_group),
        range(0, plan.out_channels, plan.out_group),
        strict=True,
    )
    return np.concatenate([part[:, first : first + plan.out_group] for part, first in groups])


def walk(
    plan: Plan,
    job: dict,
    channel: int,
    worker: int,
    x: np.ndarray,
    gy: np.ndarray,
    sums: dict[tuple[int, int, int], np.ndarray],
) -> None:
    ring: list[list[tuple[int, np.ndarray]]] = []
    for image, row, column, rows in units(plan, job["workers"], worker):
        for i in range(rows + job["extra_rows"]):
            y = row + job["shift_y"] + i
            planes = [
                fill_plane(plan, gy, job, k, (image, y, column)) for k in range(job["planes"])
            ]
            ring = [planes, *ring][: plan.stages - plan.lag]
            if i < job["extra_rows"]:
                continue
            chunk = fill_input(plan, x, (image, row + i - job["extra_rows"], column), channel)
            for slot, warps in enumerate(job["run"]):
                assert slot < job["consumers"] * plan.groups or not any(w["count"] for w in warps)
                for warp, run in enumerate(warps):
                    assert 0 <= run["back"] <= job["extra_rows"]
                    assert run["count"] <= plan.run
                    for t in range(run["count"]):
                        plane = ring[run["back"]][run["plane"]]
                        product = multiply(plan, chunk, plane, run, t)
                        sums[slot, warp, t] = sums.get((slot, warp, t), 0) + product


def store(
    plan: Plan,
    job: dict,
    channel: int,
    sums: dict[tuple[int, int, int], np.ndarray],
    gw: np.ndarray,
) -> None:
    for (slot, warp, t), total in sums.items():
        run = job["run"][slot][warp]
        first, tap = run["channel"], run["tap"] + t * plan.tap_step
        for row, values in enumerate(total):
            out = channel_of_row(plan, first + row)
            if out < plan.out_channels:
                target = gw[channel : channel + plan.tile_n, out, tap]
                assert np.isnan(target).all(), "a tap was stored twice"
                target[...] = values[: len(target)]


def bias(record: tuple[int, ...], gy: np.ndarray) -> np.ndarray:
    """What the producers add up, as csrc/cuda/sm90_wgrad_sums.cuh shares it out; else NaN."""
    plan = Plan(record)
    result = np.full(plan.out_channels, np.nan)
    line = plan.out_w * plan.element // plan.point
    for job in plan.jobs:
        marked = [k for k in range(job["planes"]) if job["plane"][k]["sum"]]
        assert len({job["plane"][k]["channel"] for k in marked}) <= 1, "one sum for each row"
        for worker in range(job["workers"] if marked else 0):
            for image, row, column, rows in units(plan, job["workers"], worker):
                first = column * plan.spread
                last = column + plan.segment >= plan.in_w
                end = line if last else min(line, first + plan.segment * plan.spread)
                for i in range(0 if row == 0 else job["extra_rows"], rows + job["extra_rows"]):
                    where = (image, row + job["shift_y"] + i, column)
                    for k in marked:
                        add_plane(plan, gy, job, k, where, end - first, result)
    return result


def add_plane(
    plan: Plan,
    gy: np.ndarray,
    job: dict,
    k: int,
    where: tuple[int, int, int],
    points: int,
    result: np.ndarray,
) -> None:
    """One plane of a chunk."""
    plane = job["plane"][k]
    y = where[1] * plan.step_y + plane["phase_y"]
    if not 0 <= y < plan.out_h:
        return
    late, tile = fill_plane(plan, gy, job, k, where)
    for i in range(plan.images):
        if (where[0] + i) % plan.in_d + plane["sum"] < plan.in_d:
            continue
        for row in range(plan.rows):
            out = channel_of_row(plan, plane["channel"] + row)
            if out >= plan.out_channels:
                continue
            begin = i * plan.segment_pitch + row * plan.pitch - plane["start"]
            if plan.flat:
                begin += (late + later(plan, row)) % (16 // plan.point)
            assert points - plane["start"] <= plan.filled, "beyond the box"
            total = tile[begin : begin + points].sum()
            result[out] = total if np.isnan(result[out]) else result[out] + total
