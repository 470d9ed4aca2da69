"""What `torch.utils.flop_counter.FlopCounterMode` counts for the operators: as for PyTorch's own.

PyTorch's formulas do the counting, so that a model has the same number before and after
`accelerate`. They are in a module that a program without a counter never loads, and which loads
triton where there is one: so they are asked for when somebody else imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

COUNTER = "torch.utils.flop_counter"

Shape = Sequence[int]


def register_at_import() -> None:
    """Now if the counter has been imported, else as soon as it is."""
    if COUNTER in sys.modules:
        register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """Finds no module itself; has `register` called at the end of the counter's import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != COUNTER:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register(counter: Any) -> None:
    """Give the counter a formula for every operator that multiplies."""

    def forward(input: Shape, weight: Shape, *rest: Any, out_shape: Shape, **more: Any) -> int:
        given = _batched(input, weight)
        return int(counter.conv_flop_count(given, weight, out_shape, transposed=True))

    def backward(
        grad_output: Shape, input: Shape, weight: Shape, by_input: bool, rest: Sequence[Any]
    ) -> int:
        stride, padding, output_padding, groups, dilation = rest
        given = _batched(input, weight)
        flops = counter.conv_backward_flop(
            _batched(grad_output, weight),
            given,
            weight,
            None,
            stride,
            padding,
            dilation,
            True,
            output_padding,
            groups,
            [by_input, not by_input, False],
            out_val=(given, weight, None),
        )
        return int(flops)

    def grad_input(
        grad_output: Shape, weight: Shape, input_size: Shape, *rest: Any, **more: Any
    ) -> int:
        return backward(grad_output, input_size, weight, True, rest)

    def grad_weight(
        grad_output: Shape, input: Shape, weight_size: Shape, *rest: Any, **more: Any
    ) -> int:
        return backward(grad_output, input, weight_size, False, rest)

    op = torch.ops.upconv
    for formula, packets in (
        (forward, [op.conv_transpose1d, op.conv_transpose2d, op.conv_transpose3d]),
        (grad_input, [op.conv_transpose_grad_input]),
        (grad_weight, [op.conv_transpose_grad_weight, op._grad_weight_and_bias]),
    ):
        counter.register_flop_formula(packets)(formula)


def _batched(shape: Shape, weight: Shape) -> list[int]:
    """A tensor without a batch counts as a batch of one."""
    return [*([1] if len(shape) < len(weight) else []), *shape]
