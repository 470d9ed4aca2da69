"""FlopCounterMode counts our operators as it counts PyTorch's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import upconv
from upconv import ops, recording
from upconv.jit import load

# in, out, kernel, stride, padding, output padding, groups; and the size of an input
LAYERS: dict[int, list[tuple[tuple[Any, ...], tuple[int, ...]]]] = {
    1: [((6, 4, 5, 3, 1, 2, 2), (7,)), ((3, 5, 4, 2), (9,))],
    2: [((4, 6, (3, 2), (2, 1), (1, 0), (1, 0)), (5, 6)), ((8, 8, 4, 2, 1, 0, 8), (5, 4))],
    3: [((2, 4, (1, 2, 3), (1, 2, 2), 0, 0, 2), (2, 3, 4)), ((3, 2, 2, 2), (3, 2, 2))],
}
CASES = [(ndim, *layer) for ndim, layers in LAYERS.items() for layer in layers]
GRADIENTS = {
    torch.ops.upconv.conv_transpose_grad_input,
    torch.ops.upconv.conv_transpose_grad_weight,
}


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our kernels wherever they are legal, in recorded calls too."""
    assert load("cpu").ok
    monkeypatch.setattr(recording, "WORTH_RECORDING_US", 0.0)
    with ops.forced("cpu_fprop"):
        yield


def counted(call: Callable[[], object]) -> FlopCounterMode:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter


def operators_in(counter: FlopCounterMode) -> set[object]:
    return set(counter.get_flop_counts()["Global"])


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(("ndim", "layer", "size"), CASES, ids=str)
@pytest.mark.usefixtures("ours")
def test_counts_are_those_of_the_nn_layer(
    ndim: int, layer: tuple[Any, ...], size: tuple[int, ...], batched: bool
) -> None:
    """Forward, and the passes that each set of wanted gradients takes."""
    theirs = getattr(nn, f"ConvTranspose{ndim}d")(*layer)
    model = nn.Sequential(getattr(nn, f"ConvTranspose{ndim}d")(*layer))
    assert upconv.accelerate(model).swapped
    x = torch.randn(*([2] if batched else []), layer[0], *size)
    forward = getattr(torch.ops.upconv, f"conv_transpose{ndim}d")
    totals = set()
    for by_input, by_weight in ((False, False), (True, False), (False, True), (True, True)):

        def call(run: nn.Module, wanted: tuple[bool, bool] = (by_input, by_weight)) -> Tensor:
            run.requires_grad_(wanted[1])
            y: Tensor = run(x.clone().requires_grad_(wanted[0]))
            if any(wanted):
                y.sum().backward()
            return y

        expected, got = counted(lambda: call(theirs)), counted(lambda: call(model))
        assert got.get_total_flops() == expected.get_total_flops()
        assert forward in operators_in(got)
        assert len(operators_in(got) & GRADIENTS) == by_input + by_weight
        totals.add(got.get_total_flops())
    assert 0 not in totals
    assert len(totals) >= 3


@pytest.mark.usefixtures("ours")
def test_weight_and_bias_together_count_as_the_weight() -> None:
    gy, x, rest = torch.randn(2, 6, 9, 9), torch.randn(2, 4, 5, 5), ([2, 2], [1, 1], [0, 0])
    sizes = ([4, 3, 3, 3], *rest, 2, [1, 1])
    op = torch.ops.upconv
    alone = counted(lambda: op.conv_transpose_grad_weight(gy, x, *sizes)).get_total_flops()
    assert alone > 0
    assert counted(lambda: op._grad_weight_and_bias(gy, x, *sizes)).get_total_flops() == alone


@pytest.mark.usefixtures("ours")
def test_counts_of_calls_that_are_pytorchs() -> None:
    """Not twice: by the operator, and by PyTorch's that it hands the call on to."""
    given = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 3)
    given[1][0, 0, 0, 0] = float("inf")
    expected = counted(lambda: nn.functional.conv_transpose2d(*given)).get_total_flops()
    got = counted(lambda: torch.ops.upconv.conv_transpose2d(*given))
    assert got.get_total_flops() == expected


SCRIPT = """
import sys
{first}
before = "torch.utils.flop_counter" in sys.modules
import upconv
assert ("torch.utils.flop_counter" in sys.modules) == before, "upconv has imported it"
import torch
import importlib.util
importlib.util.find_spec("torch.utils.flop_counter")  # a look is no import
from torch.utils.flop_counter import FlopCounterMode
assert not [finder for finder in sys.meta_path if "upconv" in type(finder).__module__]
with FlopCounterMode(display=False) as counter:
    torch.ops.upconv.conv_transpose2d(torch.ones(1, 2, 3, 3), torch.ones(2, 4, 2, 2))
assert counter.get_total_flops() == 2 * 9 * 2 * 4 * 4, counter.get_total_flops()
print("counted")
"""


@pytest.mark.parametrize("first", ["", "import torch.utils.flop_counter"], ids=["after", "before"])
def test_the_counter_may_be_imported_before_upconv_or_after(first: str) -> None:
    """And is not imported by upconv: that would load triton, where there is one."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first=first)],
        env={"UPCONV_BACKEND": "aten", "PYTHONPATH": str(Path(upconv.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "counted\n"
