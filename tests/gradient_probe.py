"""Runs in a process of its own, with a library as argument: see test_gradient_binding.py."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch

from upconv import ops, plans

CASES = {
    1: ((2, 4, 9), (4, 3, 5), ([2], [1], [1], 1, [2])),
    2: ((2, 4, 5, 6), (4, 3, 3, 2), ([2, 1], [1, 0], [1, 0], 2, [1, 3])),
    3: ((2, 4, 3, 4, 5), (4, 3, 2, 2, 3), ([1, 2, 1], [0, 1, 1], [0, 1, 0], 1, [1, 1, 2])),
}


def tensors(ndim: int, batched: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size, weight, rest = CASES[ndim]
    x, w = torch.randn(size), torch.randn(weight)
    y = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[ndim - 1](
        x, w, None, *rest
    )
    gy = torch.randn_like(y)
    return (x, w, gy) if batched else (x[0], w, gy[0])


def check_that_some_answers_are_not_kept(keys: list[list[int]], answer: list[int]) -> None:
    x, w, gy = tensors(1, True)
    more = torch.cat([gy, gy])
    arguments = (more, w, (len(more), *x.shape[1:]), *CASES[1][2])
    expected = ops._aten_gradient("grad_input", *arguments)
    answer[0] = plans.ASK_AGAIN
    for times in (1, 2):
        torch.testing.assert_close(ops.GRADIENTS["grad_input"](*arguments), expected)
        assert len(keys) == times, "the next call must ask again"
    answer[0] = plans.KERNEL_IDS["sm90_wgmma_wgrad"]
    assert bool((ops.GRADIENTS["grad_input"](*arguments) == 7).all())
    keys.clear()


def main() -> None:
    keys: list[list[int]] = []
    answer = [0]
    plans.record = lambda key: keys.append(list(key)) or list(answer)  # type: ignore[assignment]
    torch.ops.load_library(sys.argv[1])
    for ndim, batched in product(CASES, (True, False)):
        x, w, gy = tensors(ndim, batched)
        rest = CASES[ndim][2]
        lists = [rest[0], rest[1], rest[2], rest[4]]
        for direction, other, size in (
            ("grad_input", w, x.shape),
            ("grad_weight", x, w.shape),
        ):
            operator = ops.GRADIENTS[direction]
            expected = ops._aten_gradient(direction, gy, other, size, *rest)
            torch.testing.assert_close(operator(gy, other, size, *rest), expected)
            made = plans.gradient_key_of(direction, gy, other, (x.shape, w.shape), lists, rest[3])
            assert keys.pop() == made, (direction, ndim, batched)
            assert plans.problem_of(made).direction == direction
            operator(gy, other, size, *rest)
            assert not keys, "a seen call asked for its plan again"
            for bad in (gy[..., :-1], gy[:, :1]):
                with pytest.raises(RuntimeError, match="expected grad_output of size"):
                    operator(bad, other, size, *rest)
            keys.clear()
    check_that_some_answers_are_not_kept(keys, answer)
    answer[0] = plans.KERNEL_IDS["sm90_wgmma_wgrad"]
    x, w, gy = tensors(2, True)
    rest = ([2, 2], *CASES[2][2][1:])
    gy = torch.randn_like(torch.conv_transpose2d(x, w, None, *rest))
    for direction, other, size in (("grad_input", w, x.shape), ("grad_weight", x, w.shape)):
        result = ops.GRADIENTS[direction](gy, other, size, *rest)
        assert result.shape == size
        assert bool((result == 7).all()), "the kernel was not asked"
    mixed = gy.contiguous(memory_format=torch.channels_last)
    result = ops.GRADIENTS["grad_weight"](mixed, x, w.shape, *rest)
    assert not bool((result == 7).any()), "tensors of two layouts are PyTorch's"
    x.requires_grad_()
    second = torch.ops.upconv.conv_transpose_grad_weight(gy, x, w.shape, *rest)
    second.sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 7).all()), "the gradient of a gradient goes the same way"
    print("fine")


main()
