"""The scripts that measure on a GPU, and the sweeps for compute-sanitizer, on a GPU that is made
up: they run to their end, write rows that their fits read, and say it when a result is wrong.
Kernels and times are not tested here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_scripts import script

from tools import sanitize
from upconv import ops, plans
from upconv.planner import H200, Problem

GIVEN: list[str] = []
"""Kernels whose plans were to be run."""


class Clock:
    def milliseconds(self, call: Any) -> float:
        call()
        return 0.25


@pytest.fixture(autouse=True)
def made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors are the CPU's, and so are all results."""
    conv = torch.backends.cudnn.conv
    precision = conv.fp32_precision  # which the scripts set

    @contextmanager
    def given(kernel: str, params: tuple[int, ...]):
        assert all(isinstance(number, int) for number in params)
        GIVEN.append(kernel)
        yield

    def on_the_cpu(factory):
        return lambda *sizes, device=None, **rest: factory(*sizes, **rest)

    GIVEN.clear()
    for name in ("randn", "empty", "zeros"):
        monkeypatch.setattr(torch, name, on_the_cpu(getattr(torch, name)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(plans, "given", given)
    monkeypatch.setattr(plans, "cuda_hardware", lambda index: H200)
    monkeypatch.setattr(ops, "forced", lambda kernel: nullcontext())
    yield
    conv.fp32_precision = precision


def measuring(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module: ModuleType = script(name)
    monkeypatch.setattr(module, "GpuClock", Clock)
    return module


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


LAYERS = {
    "walks": Problem.of(1, 8, 8, (6, 16), 3, dtype="bfloat16"),
    "phases": Problem.of(1, 16, 16, (4, 16), 4, 2, 1, tf32=True),
    "patches": Problem.of(1, 16, 16, (4, 16), 2, 2, tf32=True),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_kernels_whose_rows_are_pixels(kind: str, tmp_path: Path, monkeypatch, capsys) -> None:
    pixels = measuring("measure_pixels", monkeypatch)
    monkeypatch.setattr(pixels, "problems", lambda *asked: iter([LAYERS[kind]]))
    path = tmp_path / "out.jsonl"
    with pytest.raises(SystemExit) as end:
        pixels.measure(kind, str(path), ("forward",))
    assert end.value.code == 0, capsys.readouterr().out
    (row,) = rows(path)
    assert row["pytorch"] == row["other"] == 0.25
    assert len(row["times"]) == len(GIVEN) > 1
    assert len(pixels.tilings_of(row)) == len(GIVEN)


def test_a_wrong_result_is_said_and_fails_at_the_end(tmp_path: Path, monkeypatch, capsys) -> None:
    pixels = measuring("measure_pixels", monkeypatch)
    monkeypatch.setattr(pixels, "problems", lambda *asked: iter([LAYERS["walks"]]))
    monkeypatch.setattr(pixels, "LIMIT", {"bfloat16": -1.0})
    with pytest.raises(SystemExit, match="results were wrong"):
        pixels.measure("walks", str(tmp_path / "out.jsonl"), ("forward",))
    assert "wrong by 0.0" in capsys.readouterr().out
    assert rows(tmp_path / "out.jsonl")[0]["times"] == []


@pytest.mark.parametrize("direction", ["forward", "grad_input"])
def test_mma(direction: str, tmp_path: Path, monkeypatch) -> None:
    mma = measuring("measure_mma", monkeypatch)
    small = next(case for case in mma.CASES if case.name == "dcgan1")
    monkeypatch.setattr(mma, "CASES", [small])
    problem = Problem.of(1, 16, 8, (4, 5), 3, 2, dtype="bfloat16")
    monkeypatch.setattr(type(small), "problem", lambda self, **of: problem)
    mma.measure(Clock(), tmp_path / "out.jsonl", "dcgan1", "bfloat16", direction)
    found = rows(tmp_path / "out.jsonl")
    assert len(found) == len(GIVEN) > 4
    assert {row["warp_pixels"] for row in found} == {32, 64}
    assert script("fit_mma").read(tmp_path / "out.jsonl")


def test_few_output_channels(tmp_path: Path, monkeypatch) -> None:
    overlap = measuring("measure_overlap", monkeypatch)
    problem = Problem.of(1, 16, 1, (8, 24), 4, 2, 1, dtype="bfloat16")
    monkeypatch.setattr(overlap, "problems", lambda: iter([problem]))
    overlap.measure(str(tmp_path / "out.jsonl"))
    (row,) = rows(tmp_path / "out.jsonl")
    assert len(row["times"]) + 1 == len(GIVEN) > 2
    assert len(overlap.measured(row)) == len(row["times"])


def test_the_kernel_for_all_layers(monkeypatch) -> None:
    sm90 = measuring("measure_sm90", monkeypatch)
    row = sm90.measure(Problem.of(1, 16, 16, (6, 9), 3, dtype="bfloat16"), H200, Clock())
    assert row is not None
    assert set(GIVEN) == {"sm90_wgmma_fprop"}
    assert row["direction"] == "forward"


def test_depthwise_gradients(monkeypatch) -> None:
    depthwise = measuring("measure_depthwise", monkeypatch)
    problem = Problem.of(1, 4, 4, (5, 9), 4, 2, 1, groups=4, direction="grad_input")
    found = list(depthwise.measure(problem, 4, Clock()))
    assert [row["kernel"] for row in found].count("depthwise_igrad") == len(GIVEN) > 1
    assert found[-1]["kernel"] == "aten"


@pytest.mark.parametrize(
    ("name", "results"),
    [
        ("fit_depthwise", "h200-depthwise-2026-11-18.jsonl.gz"),
        ("measure_overlap", "h200-overlap-2026-11-18.jsonl.gz"),
        ("measure_pixels", "h200-patches-2026-11-16.jsonl.gz"),
    ],
)
def test_what_was_measured_is_read_packed_and_unpacked(
    name: str, results: str, tmp_path: Path
) -> None:
    module = script(name)
    packed = module.read_rows(Path(module.__file__).parent / "results" / results)
    assert packed
    unpacked = tmp_path / "rows.jsonl"
    unpacked.write_text("".join(json.dumps(row) + "\n" for row in packed))
    assert module.read_rows(unpacked) == packed


@pytest.mark.parametrize("sweep", sanitize.SWEEPS)
def test_sweeps_for_the_sanitizer(sweep: str, capsys) -> None:
    """They reach their ends; what they compute, PyTorch does here."""
    sanitize.main([sweep])
    assert capsys.readouterr().out.count("clean") >= 3
