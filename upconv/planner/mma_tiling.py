"""Tiles of the mma.sync kernel: which boxes of lattice points fit, and how long each should take.

A tile is `images x depth x height x width` lattice points, at most 64 or 32 for each warp along
the pixels. Its input lies in shared memory plane by plane with its margins; the pitches are chosen
so that 8 consecutive points of the box fall into different banks wherever that costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, prod

from .mma_columns import Layout, Work, layouts, stages_of, uniform, up
from .mma_cost import CLOCK_MHZ, PACK_MICROSECONDS, BlockWork, problem_cycles
from .operands import SPLIT
from .problem import Hardware

MAX_KINDS, MAX_ROWS, MAX_PHASES = 64, 256, 256
MAX_SLICE_BLOCKS = 128
"""Whose numbers are 8 bits long."""
MAX_STEPS, MAX_STAGES, MAX_TAPS = 1024, 256, 2048
"""How much the kernel's parameters hold, as in csrc/cuda/mma_params.h."""
DEPTH = 3
"""Stages of the weight ring."""
WARP_PIXELS = (64, 32)
"""Of a warp. Of warps of 32 twice as many share a multiprocessor, for layers that mostly wait for
memory: kb72_3d in BF16 takes 83 us instead of 96, kb81 268 instead of 287."""
MAX_WARPS = 8
"""Of a block."""
WARPS_M = (8, 4, 2, 1)
STAGE_BYTES = (16384, 8192)
"""Weights of one stage, for one warp along the columns; twice that for more."""
SLOT_COST = {4: {4: 17, 2: 19, 1: 22}, 2: {4: 15, 2: 39, 1: 60}}
"""To bring one slot, by bytes of an element and pixels that are read at a time: 2.45 cycles of a
block of 4 warps by 4 pixels of float32, 3.2 one by one; 2.26 by 4 pixels of bfloat16, 5.9 by 2."""
STORED = {4: (0.75, 1.2), 2: (1.0, 2.0)}
"""How much longer than the rule says a byte takes, by bytes of an element: in vectors, and where
elements are stored one by one, in rows of odd length. kb79_1d in BF16 took 0.60 ms where 0.34 were
expected without this; in TF32 kb75 and kb81, which mostly store, took 0.40 and 0.37 where 0.51 and
0.42 were, kb77_3d 0.61 where 0.78 were expected with 2."""
BOXES = 12
"""Boxes that are looked at closely for each arrangement of warps."""


@dataclass(frozen=True)
class Box:
    """Lattice points of a tile: images, planes, rows, columns; and how its input lies."""

    size: tuple[int, int, int, int]
    fill: tuple[int, int, int]
    shift: tuple[int, int, int]
    pitches: tuple[int, int, int, int]
    """Slots from one image, plane, row and column residue to the next."""
    copy: int
    vector: int

    @property
    def points(self) -> int:
        return prod(self.size)

    @property
    def rows(self) -> int:
        return prod(self.size[:3])

    @property
    def slots(self) -> int:
        """Of one channel block."""
        return self.size[0] * self.pitches[0]

    @property
    def fills(self) -> int:
        """Input pixels of the tile."""
        return self.size[0] * prod(self.fill)


@dataclass(frozen=True)
class Tiling:
    work: Work
    layout: Layout
    box: Box
    warp_pixels: int
    warps_m: int
    slice_blocks: int
    stage_bytes: int
    cycles: float
    block: BlockWork

    @property
    def microseconds(self) -> float:
        return self.cycles / CLOCK_MHZ + PACK_MICROSECONDS

    @property
    def slices(self) -> int:
        return -(-self.work.blocks // self.slice_blocks)

    @property
    def segment(self) -> int:
        return up(self.box.size[3] * self.work.lattices[2].out_step, self.box.vector)

    @property
    def channel_pitch(self) -> int:
        """In elements; 16 bytes past a multiple of 64, so that a warp's rows spread over banks.

        Points of the warps that the box does not have lie down behind its last row.
        """
        size = self.work.element_bytes
        spare = self.box.points < self.warp_pixels * self.warps_m
        elements = self.box.rows * self.segment + spare * self.work.lattices[2].out_step
        return (up(elements * size - 16, 64) + 16) // size

    @property
    def tiles(self) -> tuple[int, int, int, int]:
        counts = (self.work.batch, *(lattice.count for lattice in self.work.lattices))
        return tuple(-(-c // s) for c, s in zip(counts, self.box.size, strict=True))  # type: ignore[return-value]

    def offset(self, shift: tuple[int, int, int], block: int) -> int:
        """Slot of a shift in the tile, for the box's first point."""
        z, y, x = (s - low for s, low in zip(shift, self.box.shift, strict=True))
        _, pitch_z, pitch_y, lane = self.box.pitches
        step = self.work.lattices[2].in_step
        slot = z * pitch_z + y * pitch_y + x % step * lane + x // step
        return block * self.box.slots + slot

    def shared(self) -> dict[str, int]:
        """Where things lie in shared memory, and how much of it a block takes."""
        buffers = 2 if self.slices > 1 else 1
        steps = max(len(kind) for kind in self.layout.steps(self.slice_blocks))
        ring_at = buffers * self.slice_blocks * self.box.slots * 16
        offsets_at = ring_at + DEPTH * self.stage_bytes
        # Tables for single pixels, to which the kernel falls back where an input is not aligned.
        positions_at = offsets_at + self.box.fills * 4
        steps_at = up(positions_at + self.box.fills * 2, 8)
        stages_at = steps_at + steps * 8
        barriers_at = stages_at + min(steps, MAX_STAGES) * 8  # a stage has a step or more
        main = barriers_at + DEPTH * 8
        staged = max(len(kind.rows) if kind.phases else 0 for kind in self.layout.kinds)
        # Rows without taps take 16 bytes of bias for each channel.
        line = max(staged * self.channel_pitch * self.work.element_bytes, 16)
        rows_at = up(self.layout.chunk * line, 16)
        phases_at = max(main, rows_at + 3 * 4 * self.box.rows)
        phases = max(len(kind.phases) for kind in self.layout.kinds)
        return {
            "ring_at": ring_at,
            "offsets_at": offsets_at,
            "positions_at": positions_at,
            "steps_at": steps_at,
            "stages_at": stages_at,
            "barriers_at": barriers_at,
            "rows_at": rows_at,
            "phases_at": phases_at,
            "bias_at": phases_at + 4 * phases,
            "shared_bytes": phases_at + 4 * phases + 4 * self.layout.chunk,
        }

    def fields(self) -> dict[str, int]:
        work, box, layout = self.work, self.box, self.layout
        z, y, x = work.lattices
        vectors = self.segment // box.vector
        return {
            "operand": work.operand,
            "warp_pixels": self.warp_pixels,
            "warps_m": self.warps_m,
            "warps_n": layout.warps_n,
            "copy": box.copy,
            "batch": work.batch,
            "groups": work.groups,
            "in_channels": work.in_channels,
            **named("in", "dhw", work.in_size),
            "out_channels": work.out_channels,
            **named("out", "dhw", (z.size, y.size, x.size)),
            **named("in_step", "zyx", (z.in_step, y.in_step, x.in_step)),
            **named("out_step", "zyx", (z.out_step, y.out_step, x.out_step)),
            **named("tiles", "ozyx", self.tiles),
            **named("tile", "ozyx", box.size),
            **named("fill", "zyx", box.fill),
            **named("shift", "zyx", box.shift),
            **named("pitch", "ozy", box.pitches[:3]),
            "lane_x": box.pitches[3],
            "plane": box.slots,
            "slice_blocks": self.slice_blocks,
            "slices": self.slices,
            "stage_bytes": self.stage_bytes,
            **self.shared(),
            "chunk": layout.chunk,
            "chunks": layout.chunks,
            "spread": int(layout.spread),
            "phase_columns": layout.phase_columns,
            "segment": self.segment,
            "channel_pitch": self.channel_pitch,
            "vector": box.vector,
            "row_lanes": min(1 << (vectors - 1).bit_length(), 32),
            "weight_in": work.weight_in,
            "weight_out": work.weight_out,
            "weight_group": work.weight_group,
            "kinds": 0,
            "rows": 0,
            "phases": 0,
            "steps": 0,
            "stages": 0,
            "taps": 0,
        }

    def notes(self) -> tuple[str, ...]:
        size = " x ".join(map(str, self.box.size))
        layout = self.layout
        counts = (self.work.batch, *(lattice.count for lattice in self.work.lattices))
        used = prod(counts) / (prod(self.tiles) * self.warps_m * self.warp_pixels)
        return (
            f"tile {size} lattice points, {self.warps_m} x {layout.warps_n} warps"
            f" of {self.warp_pixels} pixels, {used:.0%} of the pixels stored",
            f"{layout.chunk} channels a block, {len(layout.kinds)} kinds of blocks,"
            f" {self.work.lattices[2].in_step} neighbours folded into phases",
            f"{self.slices} slices of {self.slice_blocks} channel blocks,"
            f" {self.shared()['shared_bytes'] // 1024} KiB of shared memory",
            f"most of the time goes to {self.block.most};"
            f" {self.cycles / CLOCK_MHZ:.1f} us expected",
        )


def named(name: str, letters: str, values: tuple[int, ...]) -> dict[str, int]:
    return {f"{name}_{c}": value for c, value in zip(letters, values, strict=True)}


# --- Boxes ------------------------------------------------------------------------------------


def cuts(count: int, most: int) -> list[int]:
    """Sizes up to `most` that cut `count` evenly, the largest first; few of them."""
    most = min(count, most)
    parts = range(-(-count // most), -(-count // most) + 4)
    sizes = {-(-count // part) for part in parts}
    sizes |= {size for size in (1, 2, 4, 8, 16, 32, 64) if size <= most}
    return sorted(sizes, reverse=True)


def box_sizes(work: Work, most: int) -> list[tuple[int, int, int, int]]:
    """Boxes of at most `most` points, those that waste least first."""
    z, y, x = (lattice.count for lattice in work.lattices)
    found: dict[tuple[int, int, int, int], float] = {}
    spans = [high - low for low, high in work.shifts]
    for width in cuts(x, most):
        for height in cuts(y, most // width):
            for depth in cuts(z, most // (width * height)):
                images = 1
                if (depth, height, width) == (z, y, x):
                    images = min(most // (z * y * x), work.batch)
                size = (images, depth, height, width)
                used = work.batch * z * y * x
                steps = zip(size, (work.batch, z, y, x), strict=True)
                tiles = prod(-(-count // part) for part, count in steps)
                lattices = zip(size[1:], work.lattices, spans, strict=True)
                fills = images * prod((s - 1) * la.in_step + span + 1 for s, la, span in lattices)
                # Products that are thrown away, and the margins that come along.
                found[size] = tiles * (most + 0.15 * fills) / used
    return sorted(found, key=lambda size: found[size])[:BOXES]


def make_box(work: Work, size: tuple[int, int, int, int]) -> Box:
    _, depth, height, width = size
    lattice_z, lattice_y, lattice_x = work.lattices
    shift = [low for low, _ in work.shifts]
    points = zip(size[1:], work.lattices, work.shifts, strict=True)
    fill = [(s - 1) * la.in_step + high - low + 1 for s, la, (low, high) in points]
    steps = 0 if width >= lattice_x.count else width * lattice_x.in_step
    every = [c for c in (4, 2, 1) if work.in_size[2] % c == steps % c == 0]
    # Of columns that lie by residues: neighbours go round all of them, or each to its own.
    every = [c for c in every if c % lattice_x.in_step == 0 or lattice_x.in_step % c == 0]
    widths = {c: up(fill[2] + shift[2] % c, c) for c in every}
    copy = min(every, key=lambda c: widths[c] * SLOT_COST[work.element_bytes][c])
    fill[2] = widths[copy]
    shift[2] -= shift[2] % copy
    lane = -(-fill[2] // lattice_x.in_step)
    row = lane * lattice_x.in_step
    pitch_y = congruent(row, lattice_y.in_step, width) if height > 1 and width % 8 else row
    spare = height * width % 8 and depth > 1
    end = (height - 1) * pitch_y * lattice_y.in_step + width
    pitch_z = fill[1] * pitch_y
    if spare:
        pitch_z = congruent(pitch_z, lattice_z.in_step, end)
    pitch_o = fill[0] * pitch_z
    if size[0] > 1 and depth * height * width % 8:
        pitch_o = congruent(pitch_o, 1, (depth - 1) * pitch_z * lattice_z.in_step + end)
    return Box(
        size,
        (fill[0], fill[1], fill[2]),
        (shift[0], shift[1], shift[2]),
        (pitch_o, pitch_z, pitch_y, lane),
        copy,
        store_vector(work, width),
    )


def congruent(least: int, step: int, target: int) -> int:
    """The smallest pitch from `least` on with pitch * step = target modulo 8, if there is one."""
    for pitch in range(least, least + 8):
        if (pitch * step - target) % 8 == 0:
            return pitch
    return least


def store_vector(work: Work, width: int) -> int:
    """Elements of one store: whole vectors must stay in an output row and start aligned."""
    lattice = work.lattices[2]
    whole = 16 // work.element_bytes
    vector = gcd(lattice.size, whole)
    if width < lattice.count:
        vector = gcd(width * lattice.out_step, vector)
    return vector


@lru_cache(maxsize=4096)
def conflicts(size: tuple[int, int, int, int], pitches: tuple[int, int, int]) -> float:
    """Wavefronts for 8 pixels of an operand, on average over the box; 1 is best."""
    o, z, y, x = size
    slots = [
        (i * pitches[0] + j * pitches[1] + k * pitches[2] + n) % 8
        for i in range(o)
        for j in range(z)
        for k in range(y)
        for n in range(x)
    ]
    groups = [slots[i : i + 8] for i in range(0, len(slots), 8)]
    return sum(max(map(group.count, group)) for group in groups) / len(groups)


# --- Choice -----------------------------------------------------------------------------------


def slice_depths(work: Work, layout: Layout, whole: bool) -> list[int]:
    """Channel blocks of a slice: enough steps to hide the next slice's way, and no more. `whole`:
    all of them."""
    shifts = max(len(masks) for masks in layout.masks) or 1
    most = up(work.blocks, 2) if work.blocks > 1 else 1
    wanted = {most} if whole else {2 if shifts >= 8 else 4, 4 if shifts >= 3 else 8}
    result = {min(depth, most) for depth in wanted}
    if work.blocks % 2 and work.blocks <= 7:
        result.add(work.blocks)
    return sorted(result)


def tables_fit(layout: Layout) -> bool:
    kinds = layout.kinds
    return (
        len(kinds) <= MAX_KINDS
        and sum(len(kind.rows) for kind in kinds) <= MAX_ROWS
        and sum(len(kind.phases) for kind in kinds) <= MAX_PHASES
        and sum(len(kind.taps) * len(kind.phases) for kind in kinds) <= MAX_TAPS
    )


def fits(tiling: Tiling, hardware: Hardware) -> bool:
    """Of a layout whose tables fit."""
    layout, work = tiling.layout, tiling.work
    steps = layout.steps(tiling.slice_blocks)
    stages = sum(len(stages_of(work, [t for _, t in kind], tiling.stage_bytes)) for kind in steps)
    area = work.groups * prod(work.in_size)
    blocks = prod(tiling.tiles) * work.groups * layout.chunks * len(layout.kinds)
    return (
        tiling.shared()["shared_bytes"] <= hardware.shared_memory
        and sum(map(len, steps)) <= MAX_STEPS
        and stages <= MAX_STAGES
        and tiling.slice_blocks * tiling.box.slots < 2**16
        and tiling.slice_blocks <= MAX_SLICE_BLOCKS
        and (tiling.box.size[0] == 1 or tiling.box.size[0] * work.in_channels * area < 2**31)
        and blocks < 2**31
        and tiling.slices < 2**16
        and work.groups * layout.chunks < 2**16
    )


@dataclass(frozen=True)
class Totals:
    """What the steps of one slice come to, over all kinds; the same for every box."""

    steps: int
    tiles: int
    mixed: int
    """Weight tiles of the kinds whose steps differ in their tiles."""
    stages: int
    filling: int
    """Kinds that have steps at all."""


def totals(work: Work, layout: Layout, depth: int, stage_bytes: int) -> Totals:
    masks = [[mask for _, mask in kind] for kind in layout.steps(depth)]
    tiles = [sum(mask.bit_count() for mask in kind) for kind in masks]
    fast = [uniform(work, kind, stage_bytes) for kind in masks]
    return Totals(
        steps=sum(map(len, masks)),
        tiles=sum(tiles),
        mixed=sum(count for count, same in zip(tiles, fast, strict=True) if not same),
        stages=sum(len(stages_of(work, kind, stage_bytes)) for kind in masks),
        filling=sum(map(bool, masks)),
    )


def resident_warps(warp_pixels: int) -> int:
    """Warps that a multiprocessor's registers hold."""
    return 512 // warp_pixels


def block_work(
    work: Work, layout: Layout, box: Box, warps: tuple[int, int], depth: int, total: Totals
) -> BlockWork:
    """What a block has to do, averaged over the kinds; `warps` are the pixels of one and how many
    there are along them."""
    warp_pixels, warps_m = warps
    kinds = len(layout.kinds)
    each = -(-work.blocks // depth) / kinds
    phases = len(work.lattices[0].firsts) * len(work.lattices[1].firsts)
    span = work.lattices[2].out_step
    outputs = box.points * layout.chunk * phases * span / kinds
    z, y, _ = work.lattices
    pitches = (box.pitches[0], box.pitches[1] * z.in_step, box.pitches[2] * y.in_step)
    count = warps_m * layout.warps_n
    size = warp_pixels / 64
    times = 3 if work.operand == SPLIT else 1
    products = each * total.tiles * warps_m * size * times
    element = work.element_bytes
    slot_cost = SLOT_COST[element][box.copy]
    return BlockWork(
        products=products,
        mixed=each * total.mixed * warps_m * size * times,
        split=products if work.operand == SPLIT else 0.0,
        pixel_loads=each * total.steps * count * size * conflicts(box.size, pitches),
        filled=each * total.filling * depth * box.fills * slot_cost,
        stages=(each * total.stages + 1) * count,
        stored=outputs * element * STORED[element][box.vector == 1],
        runs=outputs / (box.size[3] * span),
        starts=count * size,
    )


def best_tiling(works: list[Work], hardware: Hardware) -> Tiling | None:
    """The tiling with the least expected time over all ways to lay the problem out."""
    found = sorted(tilings(works, hardware), key=lambda tiling: tiling.cycles)
    return next((tiling for tiling in found if fits(tiling, hardware)), None)


def tilings(works: list[Work], hardware: Hardware) -> Iterator[Tiling]:
    for work, warp_pixels in product(works, WARP_PIXELS):
        if prod(sum(map(len, phases)) for phases in work.taps) > MAX_TAPS:
            continue  # to find that out from the tables took 12 s for 14,000 taps
        boxes = {
            warps_m: [make_box(work, size) for size in box_sizes(work, warp_pixels * warps_m)]
            for warps_m in WARPS_M
        }
        for layout, warps_m in product(filter(tables_fit, layouts(work)), WARPS_M):
            if not 2 <= warps_m * layout.warps_n <= MAX_WARPS:
                continue
            for depth in slice_depths(work, layout, whole=warp_pixels < 64):
                stages = [size * min(layout.warps_n, 2) for size in STAGE_BYTES]
                total = {size: totals(work, layout, depth, size) for size in stages}
                for box in boxes[warps_m]:
                    yield timed(work, layout, box, (warp_pixels, warps_m), depth, total, hardware)


def timed(
    work: Work,
    layout: Layout,
    box: Box,
    warps: tuple[int, int],
    depth: int,
    total: Mapping[int, Totals],
    hardware: Hardware,
) -> Tiling:
    """The tiling with the cycles it should take; the larger stages where they cost no block."""
    warp_pixels, warps_m = warps
    count = warps_m * layout.warps_n
    most = resident_warps(warp_pixels) // count
    best: tuple[int, Tiling] | None = None
    for stage_bytes, sums in total.items():
        block = block_work(work, layout, box, warps, depth, sums)
        tiling = Tiling(work, layout, box, *warps, depth, stage_bytes, 0.0, block)
        room = (hardware.shared_memory + 1024) // (tiling.shared()["shared_bytes"] + 1024)
        resident = min(room, most)
        if best is None or resident > best[0]:
            best = (resident, tiling)
        if resident == most:
            break
    assert best is not None
    resident, tiling = best
    blocks = prod(tiling.tiles) * work.groups * layout.chunks * len(layout.kinds)
    sizes = [lattice.size for lattice in work.lattices]
    traffic = work.in_channels * prod(work.in_size) + work.out_channels * prod(sizes)
    traffic *= work.batch * work.groups * work.element_bytes
    # Of few blocks a multiprocessor has no more than its share.
    there = min(max(resident, 1), -(-blocks // hardware.multiprocessors))
    cycles = problem_cycles(tiling.block, blocks, (count, there), traffic, hardware)
    return replace(tiling, cycles=cycles)
