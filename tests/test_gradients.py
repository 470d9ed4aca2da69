"""Gradients of the benchmark: the reference against autograd, and who computed them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import Tensor

from upconv import accuracy, gradients, ops
from upconv.configurations import draw
from upconv.contenders import contender
from upconv.gradients import backward_call, errors, kernels_seen, limits, make_grad_output
from upconv.planner import Problem

LAYER = Problem.of(3, 4, 6, (5, 4), (3, 2), (2, 3), 1, (1, 0), 1, 2, dtype="float64")


def test_the_reference_is_what_autograd_gives() -> None:
    for configuration in islice(draw(20240229, ("float64",)), 80):
        problem = replace(configuration.problem, channels_last=False)
        inputs, grad_output = accuracy.make_inputs(problem), make_grad_output(problem)
        theirs = contender("torch", inputs, problem, grad_output).call()
        (found,) = errors(inputs, grad_output, problem, [theirs])
        assert set(found) == set(limits(problem))
        assert max(found.values()) < 1e-12, problem


def test_the_reference_in_pieces_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, grad_output = accuracy.make_inputs(LAYER), make_grad_output(LAYER)
    theirs = contender("torch", inputs, LAYER, grad_output).call()
    monkeypatch.setattr(gradients, "CHUNK_BYTES", 1)  # sample by sample
    (found,) = errors(inputs, grad_output, LAYER, [theirs])
    assert max(found.values()) < 1e-14


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("change", [0.25, float("nan")])
def test_one_wrong_element_is_found(part: int, change: float) -> None:
    inputs, grad_output = accuracy.make_inputs(LAYER), make_grad_output(LAYER)
    right = contender("torch", inputs, LAYER, grad_output).call()
    wrong = [tensor.clone() for tensor in right]
    wrong[part].view(-1)[-1] += change
    good, bad = errors(inputs, grad_output, LAYER, [right, tuple(wrong)])
    largest = float(right[part].abs().max())
    expected = change / largest if change == change else float("inf")
    assert bad.pop(gradients.NAMES[part]) == pytest.approx(expected)
    assert max(*good.values(), *bad.values()) < 1e-14


def test_a_gradient_of_another_shape_is_wrong() -> None:
    inputs, grad_output = accuracy.make_inputs(LAYER), make_grad_output(LAYER)
    right = contender("torch", inputs, LAYER, grad_output).call()
    (found,) = errors(inputs, grad_output, LAYER, [(right[0], right[1][:2], right[2])])
    assert found["weight"] == float("inf")


def test_limits_grow_with_what_is_added_up() -> None:
    """Also in TF32: PyTorch's own weight gradient is 1.9e-3 off after 8.4 million products."""
    large = Problem.of(8, 64, 64, (1024, 1024), 3)
    for problem in (large, replace(large, tf32=True), replace(large, dtype="bfloat16")):
        found, fewer = limits(problem), limits(replace(problem, batch=1))
        assert found["weight"] > fewer["weight"]
        assert found["input"] == fewer["input"]
        assert set(limits(replace(problem, bias=False))) == {"input", "weight"}
    assert 1.5 * 1.9e-3 < limits(replace(large, tf32=True))["weight"] < 0.005


def test_a_call_can_be_made_again_and_again() -> None:
    inputs, grad_output = accuracy.make_inputs(LAYER), make_grad_output(LAYER)
    call = backward_call(inputs, accuracy.TORCH_OPERATORS[2], grad_output)
    first, second = call(), call()
    assert all(map(torch.equal, first, second))
    assert len(first) == 3
    without = inputs._replace(bias=None)
    assert len(backward_call(without, accuracy.TORCH_OPERATORS[2], grad_output)()) == 2


def test_who_computed_them(capfd: pytest.CaptureFixture[str]) -> None:
    inputs, grad_output = accuracy.make_inputs(LAYER), make_grad_output(LAYER)
    theirs = backward_call(inputs, accuracy.TORCH_OPERATORS[2], grad_output)
    assert kernels_seen(theirs) == "aten"

    def own_and_theirs() -> tuple[Tensor, ...]:
        own = ops.FORWARD[1](*inputs[:3], *inputs.options)
        rest = (inputs.x.shape, *inputs.options)
        return own, torch.ops.upconv.conv_transpose_grad_input(grad_output, inputs.weight, *rest)

    # By itself the planner takes PyTorch's for so small a layer where there are two threads.
    with ops.forced("cpu_fprop"):
        own = kernels_seen(lambda: (ops.FORWARD[1](*inputs[:3], *inputs.options),))
        assert own == gradients.OWN
        assert kernels_seen(own_and_theirs) == gradients.MIXED
    assert capfd.readouterr().err == ""
