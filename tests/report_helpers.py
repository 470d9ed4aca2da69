"""A made-up result file with a row of every sort, and a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from upconv.bench import Row, Settings, Timing, report
from upconv.cases import CASES
from upconv.floor import Rates
from upconv.planner import H200

RATES = {"tf32": Rates(421e12, 4.27e12), "bfloat16": Rates(805e12, 4.27e12)}
SHOWN = [case for case in CASES if case.name in ("kb69", "dcgan1", "kb79_1d", "kb72_3d")]


def timing(median: float) -> Timing:
    return Timing(median, 0.98 * median, 1.02 * median, 0.97 * median, 20)


def made_up_row(index: int, dtype: str, layout: str, direction: str) -> Row:
    """Times as multiples of the floor; dcgan1 is slower, kb72_3d is PyTorch's own operator."""
    case = SHOWN[index]
    tf32 = dtype == "tf32"
    problem = case.problem(
        dtype="float32" if tf32 else dtype, tf32=tf32, channels_last=layout == "channels_last"
    )
    floor = RATES[dtype].floor_ms(problem, direction)
    ours = {"kb69": 1.5, "dcgan1": 5.0, "kb79_1d": 2.0, "kb72_3d": 8.0}[case.name]
    times = {"torch": timing(4.0 * floor), "upconv": timing(ours * floor)}
    if case.name == "kb72_3d":
        times["torch"] = timing(8.1 * floor)
    skipped = {"channels_last": "1-D tensors have no channels_last layout"}
    if layout == "contiguous" and case.ndim > 1:
        times["channels_last"], skipped = timing(3.0 * floor), {}
    gradients, limits = {}, {}
    if direction == "backward":
        limits = {"input": 2e-3, "weight": 2e-3, "bias": 1e-4}
        gradients = {name: {"input": 2e-4, "weight": 1e-4, "bias": 1e-6} for name in times}
    by_pytorch = case.name == "kb72_3d"
    return Row(
        case.name,
        problem,
        case.batch,
        "aten" if by_pytorch else "sm90_wgmma_fprop",
        "slower here: 120 us expected" if by_pytorch else "",
        direction,
        dict.fromkeys(times, 2e-4),
        2e-3,
        times,
        skipped=skipped,
        scratch={name: 0 if name == "upconv" else 3 << 30 for name in times},
        gradients=gradients,
        limits=limits,
        floor_ms=floor,
    )


def made_up_results() -> dict[str, Any]:
    """Two dtypes, two layouts and two directions; a wrong row and a failed one in the first."""
    kinds = product(RATES, ("contiguous", "channels_last"), ("forward", "backward"))
    rows = [
        made_up_row(index, *kind)
        for kind in kinds
        for index, case in enumerate(SHOWN)
        if case.ndim > 1 or kind[1] == "contiguous"
    ]
    wrong = replace(rows[0], case="off<b>", errors={"torch": 1e-4, "upconv": 0.5}, times={})
    failed = replace(rows[0], case="full", errors={}, times={}, failure="RuntimeError: no memory")
    against = ("default", "channels_last")
    results = report([*rows, wrong, failed], Settings(against=against), rates=RATES)
    results["environment"] |= {"hardware": asdict(H200), "cuda": "13.0", "commit": "abc1234"}
    results["settings"]["device"] = "cuda"
    return results


def write(path: Path, results: dict[str, Any]) -> Path:
    path.write_text(json.dumps(results))
    return path


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium: playwright's own or the machine's; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        tried = [started.chromium.executable_path]
        names = ("chromium", "chromium-browser", "google-chrome")
        tried += [path for path in map(shutil.which, names) if path]
        there = [path for path in tried if Path(path).exists()]
        if not there:
            pytest.skip("no Chromium here: tools/install_browser.sh installs one")
        # Without its sandbox, which root cannot have; it sees pages of our own only.
        running = started.chromium.launch(executable_path=there[0], args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()
