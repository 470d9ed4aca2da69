"""The Hopper kernel's barriers, played through in Python: who waits for whom, and for what.

Each role of csrc/cuda/sm90_wgmma_fprop.cuh is a generator that yields the barrier it waits for; a
seeded scheduler picks who goes on. Barriers have an arrival count and a phase, and a wait tests a
parity, as mbarriers do, so that a wait which could pass a phase too early does so here too. Slots
and stages carry what was put into them, and every consumer checks that it reads what its turn
needs. Nothing is computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

from sm90_emulator import Plan

LOADER_WARPS = 3
Role = Iterator[Callable[[], bool]]


@dataclass
class Barrier:
    arrivals: int
    pending: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.arrivals

    def arrive(self) -> None:
        assert self.pending > 0, "more arrivals than the phase has room for"
        self.pending -= 1
        if self.pending == 0:
            self.phase += 1
            self.pending = self.arrivals

    def passed(self, parity: int) -> bool:
        """Has the phase of this parity completed? Only the last bit of the phase is known."""
        return (self.phase - 1) % 2 == parity


@dataclass
class Ring:
    """Places that are filled and emptied in turn, and what each of them holds."""

    size: int
    fillers: int
    readers: int
    stays: bool = False
    """Filled once, then only read."""
    full: list[Barrier] = field(init=False)
    free: list[Barrier] = field(init=False)
    holds: list[object] = field(init=False)

    def __post_init__(self) -> None:
        self.full = [Barrier(self.fillers) for _ in range(self.size)]
        self.free = [Barrier(self.readers) for _ in range(self.size)]
        self.holds = [None] * self.size


@dataclass
class Place:
    """A role's position in a ring, with the parity it waits for next."""

    ring: Ring
    parity: int
    at: int = 0

    def skip(self, count: int = 1) -> None:
        self.at += count
        while self.at >= self.ring.size:
            self.at -= self.ring.size
            self.parity ^= not self.ring.stays
        while self.at < 0:
            self.at += self.ring.size
            self.parity ^= 1


class Block:
    """One thread block with the units `first, first + step, ...` of the plan."""

    def __init__(self, plan: Plan, first: int, step: int) -> None:
        self.plan = plan
        self.units = list(range(first, unit_count(plan), step))
        self.together = plan.parts == 2  # both consumers work on every unit, without turns
        self.in_turn = bool(plan.alternate) and not self.together
        self.slots = Ring(plan.slots, LOADER_WARPS, 1 if self.in_turn else 2)
        self.turns = not self.together and plan.rings == 1
        readers = 2 if self.together else 1
        # Without turns each consumer has a ring; else the two names are of the same one.
        rings = [Ring(plan.stages, 1, readers, bool(plan.resident)) for _ in range(plan.rings)]
        self.stages = [rings[0], rings[-1]]
        self.boxes = Ring(max(plan.raw_chunks, 2), 1, LOADER_WARPS)
        self.turn = [Barrier(1), Barrier(1)]
        self.done = [0, 0]

    def job(self, unit: int, c: int) -> int:
        group = unit % self.plan.job_groups
        return group if self.plan.alternate else 2 * group + c

    def slices(self, unit: int) -> list[tuple[int, int]]:
        """(visit, channel slice) in the order in which the unit reads them."""
        job = self.plan.jobs[self.job(unit, 0)]
        visits = range(job["visit"], job["visit"] + job["visits"])
        return list(product(visits, range(self.plan.slices)))

    def steps(self, visit: int, c: int) -> int:
        """Weight blocks of a consumer in each slice of a visit."""
        return int(self.plan.visits[visit]["steps"][c])

    def weights(self, sides: tuple[int, ...]) -> Role:
        """The feeder's weight blocks for these consumers, in the order of their turns, straight
        through each job's; of the first unit alone where they stay."""
        ring = self.stages[sides[0]]
        place = Place(ring, 1)
        for unit in self.units[:1] if self.plan.resident else self.units:
            slices = self.slices(unit)
            tile = unit // self.plan.job_groups
            sent = [0, 0]
            for first in range(0, len(slices), self.plan.turn_slices):
                for c in sides:
                    for visit, _ in slices[first : first + self.plan.turn_slices]:
                        for _ in range(self.steps(visit, c)):
                            yield self._free(place)
                            ring.holds[place.at] = (self._weights(tile), self.job(unit, c), sent[c])
                            sent[c] += 1
                            ring.full[place.at].arrive()
                            place.skip()

    def _weights(self, tile: int) -> int:
        """The tile for which weights were loaded: any where they stay."""
        return 0 if self.plan.resident else tile

    def input(self) -> Role:
        """The feeder's boxes."""
        place = Place(self.boxes, 1)
        for unit in self.units:
            for _ in self.slices(unit):
                for _ in range(self.plan.slice_blocks // max(self.plan.raw_blocks, 1)):
                    yield self._free(place)
                    self.boxes.full[place.at].arrive()
                    place.skip()

    def loader(self) -> Role:
        box, slot = Place(self.boxes, 0), Place(self.slots, 1)
        for unit in self.units:
            for slice_ in self.slices(unit):
                yield self._free(slot)
                for _ in range(self.plan.slice_blocks // max(self.plan.raw_blocks, 1)):
                    yield self._full(box)
                    self.boxes.free[box.at].arrive()
                    box.skip()
                self.slots.holds[slot.at] = (unit // self.plan.job_groups, slice_)
                self.slots.full[slot.at].arrive()
                slot.skip()

    def consumer(self, c: int) -> Role:
        """Issues steps, and gives back what the ones before the last two have read."""
        ring = self.stages[c]
        slot, stage, parity = Place(self.slots, 0), Place(ring, 0), 1 - c
        for index, unit in enumerate(self.units):
            slices, job = self.slices(unit), self.job(unit, c)
            tile, side = unit // self.plan.job_groups, 0 if self.plan.alternate else c
            if self.in_turn and index % 2 != c:
                stage.skip(self.plan.jobs[job]["steps"])
                slot.skip(len(slices))
                continue
            sent = first = 0
            while True:
                turn = slices[first : first + self.plan.turn_slices]
                other = 0
                if self.turns and not self.plan.alternate:
                    other = sum(self.steps(visit, 1 - c) for visit, _ in turn)
                stage.skip(other if c == 1 else 0)
                wanted = parity
                if self.turns:
                    yield lambda wanted=wanted: self.turn[c].passed(wanted)  # type: ignore[misc]
                parity ^= 1
                flight: list[list[Barrier]] = []
                for slice_ in turn:
                    if not self._full(slot)():
                        self._retire(flight, 0)
                        yield self._full(slot)
                    assert self.slots.holds[slot.at] == (tile, slice_)
                    steps = self.steps(slice_[0], side)
                    for _ in range(steps):
                        yield self._full(stage)
                        assert ring.holds[stage.at] == (self._weights(tile), job, sent)
                        sent += 1
                        flight.append([] if self.plan.resident else [ring.free[stage.at]])
                        self._retire(flight, 2)
                        stage.skip()
                    if steps:
                        flight[-1].append(self.slots.free[slot.at])
                    else:
                        self.slots.free[slot.at].arrive()
                    slot.skip()
                if self.turns:
                    self.turn[1 - c].arrive()
                self._retire(flight, 0)
                stage.skip(other if c == 0 else 0)
                first += len(turn)
                if first >= len(slices):
                    break
            assert sent == self.plan.jobs[job]["steps"]
            self.done[c] += 1

    @staticmethod
    def _free(place: Place) -> Callable[[], bool]:
        at, parity = place.at, place.parity
        return lambda: place.ring.free[at].passed(parity)

    @staticmethod
    def _full(place: Place) -> Callable[[], bool]:
        at, parity = place.at, place.parity
        return lambda: place.ring.full[at].passed(parity)

    @staticmethod
    def _retire(flight: list[list[Barrier]], keep: int) -> None:
        while len(flight) > keep:
            for barrier in flight.pop(0):
                barrier.arrive()


def unit_count(plan: Plan) -> int:
    tiles = plan.tiles_o * plan.tiles_z * plan.tiles_y * plan.tiles_x
    return tiles * plan.conv_groups * plan.job_groups


def play(record: tuple[int, ...], multiprocessors: int, seed: int) -> None:
    """Runs the first and the last block of a launch to their end; an assertion or an error tells
    what goes wrong."""
    plan = Plan(record)
    blocks = min(unit_count(plan), multiprocessors)
    choice = random.Random(seed)
    for first in {0, blocks - 1}:
        block = Block(plan, first, blocks)
        fed = [(0,)] if plan.alternate else [(0,), (1,)] if plan.rings == 2 else [(0, 1)]
        roles: list[Role] = [block.weights(sides) for sides in fed]
        roles += [block.consumer(c) for c in (0, 1)]
        roles += [block.loader() for _ in range(LOADER_WARPS)]
        roles += [block.input()]
        waiting = {role: next(role, None) for role in roles}
        while any(wait is not None for wait in waiting.values()):
            ready = [r for r, wait in waiting.items() if wait is not None and wait()]
            assert ready, "every role waits: the block hangs"
            role = choice.choice(ready)
            waiting[role] = next(role, None)
        own = len(block.units)
        expected = [-(-own // 2), own // 2] if block.in_turn else [own, own]
        assert block.done == expected
