"""Fits the cost of the weight's gradient on Hopper to measured plans, and prints it.

    python benchmarks/fit_wgrad.py

A line of MEASURED is one plan of one case, of DRAWN one of a drawn layer (batch, channels, size,
kernel, stride, padding, output padding, dilation, groups): the form (consumers, n, groups, run,
pairs), the chunk (boxes to lag), the blocks of each job, and the milliseconds that it took. The
constants belong into upconv/planner/sm90_wgrad_cost.py.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from upconv.cases import CASES
from upconv.planner import H200, Problem
from upconv.planner import sm90_wgrad_cost as cost
from upconv.planner.sm90_cost import CLOCK_MHZ
from upconv.planner.sm90_wgrad import blocks_of, flat
from upconv.planner.sm90_wgrad_chunks import Chunk, jobs_of
from upconv.planner.sm90_wgrad_jobs import Form

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = RESULTS / "h200-wgrad-2026-11-15.jsonl"
DRAWN = RESULTS / "h200-wgrad-drawn-2026-11-16.jsonl.gz"


def read(*paths: Path) -> list[dict[str, Any]]:
    texts = [
        gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        for path in paths
    ]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def problem_of(row: dict[str, Any]) -> Problem:
    if "layer" in row:
        layer = Problem.of(*row["layer"])
    else:
        layer = next(case for case in CASES if case.name == row["case"]).problem()
    return flat(replace(layer, dtype=row["dtype"], tf32=True, direction="grad_weight", bias=False))


def blocks(row: dict[str, Any]) -> cost.Blocks:
    """The blocks of a measured plan."""
    problem = problem_of(row)
    form = Form(*(row[field.name] for field in fields(Form)))
    chunk = Chunk(*(row[field.name] for field in fields(Chunk)))
    return blocks_of(problem, form, jobs_of(problem, form, chunk.boxes), chunk, H200)


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
    found, spread = fitted(read(MEASURED, DRAWN))
    names = [*cost.PRODUCER_CYCLES, *cost.CONSUMER_CYCLES, "row", "shadow with a slot to spare"]
    for name, value, before in zip(names, found, known(), strict=True):
        print(f"{name:30} {value:10.4g}   (planner: {before:.4g})")
    print(f"standard deviation of predicted over measured: {spread:.3f}")
