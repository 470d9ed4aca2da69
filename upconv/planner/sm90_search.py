"""The search for a tiling of the Hopper kernel: every legal one, or the fastest and few others.

Tilings that differ only in their rings have most of their work in common, and no work takes less
than no time: an `Opening` knows what all of its tilings take at the very least. In that order few
have to be looked at. (A vocoder's layer has 12,000, which took 0.33 s: every new length of a signal
waits for its plan. Now 0.07; kb81 0.37 and 0.02.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .problem import Hardware
from .sm90_area import COPY_BOXES, GROUP, Area, areas, compiled, raw_rings, tile_counts
from .sm90_cost import gathering_cycles
from .sm90_load import MAX_JOBS, Load
from .sm90_task import Shape
from .sm90_tiling import (
    SPLIT_TILES,
    TILES,
    Tiling,
    addressable,
    constants_of,
    memory_cycles,
    operand_reads,
    pipelines,
    store_vector,
    store_work,
)

if TYPE_CHECKING:
    from .sm90 import Job

ROUNDING = 1 - 1e-9
"""Sums of the same terms in another order."""


class Common(NamedTuple):
    """What openings have in common that differ in their slices alone."""

    cycles: float
    """Of a unit: its stores, and what every unit costs."""
    memory: float
    """Cycles that the memory needs for a unit at the least."""
    waves: int
    once: float
    """Cycles before and after all units."""


class Opening(NamedTuple):
    """A tiling but for its rings."""

    shape: Shape
    load: Load
    job_list: list[Job]
    form: tuple[int, int, bool, int]
    """N, row blocks, whether consumers take turns, channel blocks of a slice."""
    area: Area
    hardware: Hardware

    def tilings(self) -> Iterator[Tiling]:
        shape, load, job_list, form, area, hardware = self
        reads = load.pairs / max(load.visits, 1) * operand_reads(form[0], shape.task.split)
        for ring in raw_rings(shape, area, form[3], reads):
            yield from pipelines(shape, load, job_list[0], form, area, ring, hardware)

    def common(self) -> Common:
        task, job = self.shape.task, self.job_list[0]
        each = constants_of(task)
        units = prod(tile_counts(self.shape, self.area)) * self.load.groups * task.groups
        stores = store_work(self.shape, job, self.form, self.area, units)
        cycles = sum(each[name] * value for name, value in stores._asdict().items())
        cycles += each["paired"] * stores.stored if job.paired else 0.0
        memory, before = memory_cycles(task, units, self.hardware)
        waves = -(-units // self.hardware.multiprocessors)
        return Common(cycles + each["unit"], memory, waves, before + each["start"])

    def least_cycles(self, common: Common) -> float:
        """Of every tiling with this opening: what does not depend on the rings."""
        shape, load, _, (n, _, _, slice_blocks), area, _ = self
        task, each = shape.task, constants_of(shape.task)
        share = -(-task.channel_blocks // slice_blocks) / load.groups
        slices = load.visits * share
        placed = area.pixels * slice_blocks * slices * 16
        work = (
            common.cycles
            + each["operands"] * load.pairs * share * operand_reads(n, task.split)
            + each["margins"] * placed * (1 - GROUP / area.strip)
            + each["slices"] * slices
            + each["gathered"] * placed * gathering_cycles(area.copy, shape.steps[2])
        )
        return (max(work, common.memory) * common.waves + common.once) * ROUNDING


def openings(
    shape: Shape, by_blocks: Mapping[int, list[Job] | None], hardware: Hardware
) -> Iterator[Opening]:
    """Every legal one of a shape."""
    split = shape.task.split
    total_blocks = shape.task.channel_blocks
    depths = sorted({b for b in (16, 8, 4, 2, total_blocks) if b <= min(max(total_blocks, 2), 16)})
    loads: dict[tuple[int, bool, int], Load] = {}
    for n, blocks in SPLIT_TILES if split else TILES:
        job_list = by_blocks[blocks]
        if not job_list or len(job_list) + 1 > MAX_JOBS:  # an odd number gets one that idles
            continue
        orders = (True, False) if len(job_list) > 1 and not split else (True,)
        if job_list[0].paired:
            orders = (False,)
        for area in areas(shape, n, store_vector(shape, job_list)):
            if not (addressable(shape.task, area) and compiled(area, n, blocks, split)):
                continue
            for slice_blocks in reversed(depths):
                if area.copy < COPY_BOXES and slice_blocks > 4 and slice_blocks % 4:
                    continue  # the loaders by themselves take four at a time
                for alternate in orders:
                    key = blocks, alternate, slice_blocks
                    if key not in loads:
                        whole = slice_blocks >= total_blocks
                        loads[key] = Load.of(job_list, alternate, slice_blocks, split, whole)
                    if loads[key].fits:
                        yield Opening(shape, loads[key], job_list, (n, *key), area, hardware)


def tilings(
    shape: Shape, by_blocks: Mapping[int, list[Job] | None], hardware: Hardware
) -> Iterator[Tiling]:
    """Every legal tiling of a shape, with its expected time."""
    for opening in openings(shape, by_blocks, hardware):
        yield from opening.tilings()


def fastest(every: list[Opening]) -> tuple[Opening, Tiling] | None:
    """The tiling with the least expected time, the first of equals; None where nothing fits."""
    known: dict[tuple[int, ...], Common] = {}
    ordered = []
    for number, opening in enumerate(every):
        key = id(opening.shape), id(opening.area), *opening.form[:3]
        if key not in known:
            known[key] = opening.common()
        ordered.append((opening.least_cycles(known[key]), number))
    best: tuple[float, int, Tiling] | None = None
    for least, number in sorted(ordered):
        if best is not None and least > best[0]:
            break
        for tiling in every[number].tilings():
            if best is None or (tiling.cycles, number) < best[:2]:
                best = tiling.cycles, number, tiling
    return None if best is None else (every[best[1]], best[2])
