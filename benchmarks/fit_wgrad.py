"""Measures plans of the weight's gradient on Hopper, and fits their cost.

    python benchmarks/fit_wgrad.py measure OUT.jsonl [SECONDS]
    python benchmarks/fit_wgrad.py

A line of MEASURED is one plan of a case or of a drawn layer (batch, channels, size, kernel, stride,
padding, output padding, dilation, groups): the form (consumers, n, groups, run, pairs), the chunk
(boxes to lag), the blocks of each job, and the milliseconds that it took. `measure` takes all of
these plans again, and those that the planner would pick by now; results of a layer are compared
with each other. The constants belong into upconv/planner/sm90_wgrad_cost.py.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict, fields, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rows import read_rows

from upconv import ops, plans
from upconv.cases import CASES
from upconv.planner import H200, Problem
from upconv.planner import sm90_wgrad_cost as cost
from upconv.planner.sm90_cost import CLOCK_MHZ
from upconv.planner.sm90_wgrad import KERNEL, Option, blocks_of, options, record
from upconv.planner.sm90_wgrad_chunks import Chunk, jobs_of
from upconv.planner.sm90_wgrad_jobs import Form
from upconv.stopwatch import GpuClock

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = RESULTS / "h200-wgrad-2026-11-16.jsonl.gz"
RUNS = 5


def layer_of(row: dict[str, Any]) -> Problem:
    if "layer" in row:
        layer = Problem.of(*row["layer"])
    else:
        layer = next(case for case in CASES if case.name == row["case"]).problem()
    return replace(layer, dtype=row["dtype"], tf32=True, direction="grad_weight", bias=False)


def plan_of(row: dict[str, Any]) -> tuple[Form, Chunk]:
    form = Form(**{field.name: row[field.name] for field in fields(Form) if field.name in row})
    return form, Chunk(*(row[field.name] for field in fields(Chunk)))


def blocks(row: dict[str, Any]) -> cost.Blocks:
    """The blocks of a measured plan."""
    problem, (form, chunk) = layer_of(row).in_three(), plan_of(row)
    return blocks_of(problem, form, jobs_of(problem, form, chunk.boxes), chunk, H200)


# --- Measuring ----------------------------------------------------------------------------------


def row_of(which: dict[str, Any], option: Option) -> dict[str, Any]:
    form, _, chunk, split = option
    return {**which, "workers": list(split.workers), **asdict(form), **asdict(chunk)}


def picked(problem: Problem) -> list[Option]:
    """What the planner expects to be the fastest plan, and that of every form that is close."""
    best: dict[Form, Option] = {}
    for option in options(problem, H200):
        least = best.get(option[0])
        if least is None or option[3].microseconds < least[3].microseconds:
            best[option[0]] = option
    ranked = sorted(best.values(), key=lambda option: option[3].microseconds)
    return [o for o in ranked if o[3].microseconds < 1.3 * ranked[0][3].microseconds]


class Measure:
    """All plans of one layer, on the same tensors."""

    def __init__(self, layer: Problem) -> None:
        dtype = getattr(torch, layer.dtype)
        self.problem = layer.in_three()
        self.x = torch.randn(layer.batch, layer.in_channels, *layer.in_size, device="cuda")
        self.gy = torch.randn(layer.batch, layer.out_channels, *layer.out_size, device="cuda")
        self.x, self.gy = self.x.to(dtype), self.gy.to(dtype)
        self.shape = (layer.in_channels, layer.out_channels // layer.groups, *layer.kernel)
        self.rest = (layer.stride, layer.padding, layer.output_padding)
        self.rest += (layer.groups, layer.dilation)
        self.first: torch.Tensor | None = None

    def call(self) -> torch.Tensor:
        return ops.GRADIENTS["grad_weight"](self.gy, self.x, self.shape, *self.rest)

    def milliseconds(self, clock: GpuClock, row: dict[str, Any]) -> float:
        form, chunk = plan_of(row)
        jobs = jobs_of(self.problem, form, chunk.boxes)
        split = cost.Split(tuple(row["workers"]), 0, 0.0, "")
        with plans.given(KERNEL, record(self.problem, form, jobs, chunk, split)):
            result = self.call().float()
            self.first = result if self.first is None else self.first
            assert (result - self.first).norm() <= 2e-3 * self.first.norm(), row
            return median(clock.milliseconds(lambda: (self.call(),)) for _ in range(RUNS))


def measure(out: Path, seconds: float) -> None:
    def key(row: dict[str, Any]) -> tuple[str, str]:
        return row["case"], row["dtype"]

    assert ops.serve("cuda_wgrad")  # until then the planner's own choice is asked for
    clock, end = GpuClock(), time.monotonic() + seconds
    layers = [list(rows) for _, rows in groupby(sorted(read_rows(MEASURED), key=key), key)]
    random.Random(0).shuffle(layers)
    with out.open("w") as file, torch.no_grad():
        for rows in layers:
            if time.monotonic() > end:
                break
            which = {name: rows[0][name] for name in ("case", "layer", "dtype") if name in rows[0]}
            this = Measure(layer_of(rows[0]))
            known = [{name: value for name, value in row.items() if name != "ms"} for row in rows]
            fresh = [row_of(which, option) for option in picked(this.problem)]
            for row in [*known, *(row for row in fresh if row not in known)]:
                file.write(json.dumps({**row, "ms": this.milliseconds(clock, row)}) + "\n")


# --- Fitting ------------------------------------------------------------------------------------


class Table:
    """What the cost rule sees of every plan: one line for each job of it."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        works = [(row, blocks(row)) for row in rows]
        works = [(row, each) for row, each in works if not any(w.waits for w in each.work)]
        self.measured = np.array([row["ms"] * 1e3 for row, _ in works])
        self.besides = np.array([each.besides(row["workers"]) for row, each in works])
        self.memory = np.array([each.memory for _, each in works])
        jobs = [
            (plan, each, job, each.rounds(row["workers"]) * each.cycles(job, workers))
            for plan, (row, each) in enumerate(works)
            for job, workers in enumerate(row["workers"])
        ]
        self.plan = np.array([plan for plan, _, _, _ in jobs])
        self.count = np.array([cycles / each.work[j].cycles for _, each, j, cycles in jobs])

        def counts(names: list[str]) -> np.ndarray:
            return np.array(
                [[float({**vars(e.work[j]), "chunk": 1}[n]) for n in names] for _, e, j, _ in jobs]
            )

        self.producers = counts(list(cost.PRODUCER_CYCLES))
        self.consumers = counts(list(cost.CONSUMER_CYCLES))
        self.tensor = np.array([each.work[j].tensor for _, each, j, _ in jobs])
        self.spare = np.array([each.work[j].spare for _, each, j, _ in jobs])

    def predicted(self, constants: np.ndarray) -> np.ndarray:
        """Microseconds of every plan: the producers' constants, the consumers', row and shadow."""
        first, second = len(cost.PRODUCER_CYCLES), len(cost.CONSUMER_CYCLES)
        producers = self.producers @ constants[:first]
        consumers = np.maximum(self.consumers @ constants[first : first + second], self.tensor)
        shadow = np.where(self.spare, constants[-1], cost.SHADOW[False])
        cycles = np.maximum(producers, consumers) + shadow * np.minimum(producers, consumers)
        slowest = np.zeros(len(self.measured))
        np.maximum.at(slowest, self.plan, cycles * self.count)
        memory = self.memory[:, 0] * (1 + constants[-2] * self.memory[:, 1])
        total = (slowest**cost.TOGETHER + memory**cost.TOGETHER) ** (1 / cost.TOGETHER)
        return total / CLOCK_MHZ + self.besides


def known() -> np.ndarray:
    cycles = [*cost.PRODUCER_CYCLES.values(), *cost.CONSUMER_CYCLES.values()]
    return np.array([*cycles, cost.ROW_BYTES, cost.SHADOW[True]])


def fitted(rows: list[dict[str, Any]], steps: int = 60) -> tuple[np.ndarray, float]:
    """Constants with the least squared logarithm of predicted over measured, and its deviation.

    Levenberg's method from the planner's constants on; logarithms of constants keep them positive.
    Plans that copy element by element are left out: the latency of memory hides all else.
    """
    table = Table(rows)
    logs, damping = np.log(known()), 1.0

    def errors(at: np.ndarray) -> np.ndarray:
        return np.log(table.predicted(np.exp(at)) / table.measured)

    best = errors(logs)
    for _ in range(steps):
        slopes = np.stack(
            [(errors(logs + 1e-4 * unit) - best) / 1e-4 for unit in np.eye(len(logs))], axis=1
        )
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(logs)), -slopes.T @ best)
        tried = errors(logs + np.clip(step, -1, 1))
        if tried @ tried < best @ best:
            logs, best, damping = logs + np.clip(step, -1, 1), tried, damping / 3
        else:
            damping = min(damping * 4, 1e6)
    return np.exp(logs), float(np.std(best))


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 600.0)
        sys.exit()
    found, spread = fitted(read_rows(MEASURED))
    names = [*cost.PRODUCER_CYCLES, *cost.CONSUMER_CYCLES, "row", "shadow with a slot to spare"]
    for name, value, before in zip(names, found, known(), strict=True):
        print(f"{name:30} {value:10.4g}   (planner: {before:.4g})")
    print(f"standard deviation of predicted over measured: {spread:.3f}")
