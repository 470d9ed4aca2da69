"""The floor: the longer of arithmetic and traffic, at rates that were measured."""

from __future__ import annotations

from math import isclose

import pytest
import torch

from upconv import floor
from upconv.floor import Rates, measured_rates, precision, product_rate
from upconv.planner import Problem

PROBLEM = Problem.of(2, 8, 16, (10, 10), 3, dtype="bfloat16")


def test_the_longer_of_both_counts() -> None:
    work, traffic = PROBLEM.flops, PROBLEM.bytes
    assert isclose(Rates(1e9, 1e15).floor_ms(PROBLEM, "forward"), work / 1e6)
    assert isclose(Rates(1e18, 1e6).floor_ms(PROBLEM, "forward"), traffic / 1e3)
    assert isclose(Rates(1e18, 1e6).floor_ms(PROBLEM, "backward"), 2 * traffic / 1e3)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_rates_of_this_cpu(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Between what a pocket calculator does and what no CPU does."""
    monkeypatch.setitem(floor.MATRIX, "cpu", 256)
    monkeypatch.setitem(floor.COPIED_BYTES, "cpu", 16 << 20)
    rates = measured_rates("cpu", dtype, 0.01)
    assert 1e8 < rates.flop_per_s < 1e15
    assert 1e8 < rates.byte_per_s < 1e14


def test_sixteen_bits_take_the_faster_way(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {torch.float32: 2.0, torch.bfloat16: 3.0, torch.float16: 1.0}
    monkeypatch.setattr(floor, "product_rate", lambda device, dtype, *rest: speeds[dtype])
    assert floor.faster_on_cpu(torch.bfloat16) == torch.bfloat16
    assert floor.faster_on_cpu(torch.float16) == torch.float32


@pytest.mark.parametrize("what", ["conv", "matmul"])
def test_one_switch_is_set_and_set_back(what: str) -> None:
    """The switches are there without a GPU too."""
    switches = {
        "conv": torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        "matmul": torch.backends.cuda.matmul,
    }
    before = {name: switch.fp32_precision for name, switch in switches.items()}
    for dtype, value in (("tf32", "tf32"), ("float32", "ieee")):
        with precision("cuda", dtype, what):
            within = {name: switch.fp32_precision for name, switch in switches.items()}
            assert within == before | {what: value}
        assert {name: switch.fp32_precision for name, switch in switches.items()} == before
    with precision("cuda", "bfloat16", what), precision("cpu", "float32", what):
        assert {name: switch.fp32_precision for name, switch in switches.items()} == before


@pytest.mark.gpu
def test_rates_of_this_gpu() -> None:
    """Tensor cores are faster than strict float32, and the switches are as they were after it."""
    before = torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]
    strict, tf32 = (measured_rates("cuda", name, 0.05) for name in ("float32", "tf32"))
    assert tf32.flop_per_s > 1.5 * strict.flop_per_s
    assert torch.backends.cuda.matmul.fp32_precision == before  # type: ignore[attr-defined]
    with precision("cuda", "float32", "matmul"):
        slow = product_rate("cuda", torch.float32, 4096, 0.05)
    assert slow < tf32.flop_per_s
