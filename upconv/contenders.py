"""What `upconv bench` measures upconv against: PyTorch's operator, called in four ways.

Results are kept under short names: "torch" is PyTorch as called without a thought (`default` on
the command line), the others are called what the command line calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from .accuracy import Inputs, Operator
    from .planner import Problem

KEYS = {
    "default": "torch",
    "benchmark": "benchmark",
    "channels_last": "channels_last",
    "compile": "compile",
}
"""What `--against` takes, and the name in the results."""

TITLES = {
    "torch": "PyTorch",
    "benchmark": "cudnn.benchmark",
    "channels_last": "channels_last",
    "compile": "torch.compile",
    "upconv": "upconv",
}
"""The heads of the columns, in their order."""

Call = Callable[[], "tuple[Tensor, ...]"]
"""What is timed: its results are the output, or the gradients of input, weight and bias."""
T = TypeVar("T")


@dataclass(frozen=True)
class Contender:
    """A call, ready to be timed: its tensors are made, and laid out as it takes them."""

    call: Call
    executor: ThreadPoolExecutor | None = None
    """The thread that the call belongs to, where it is not the caller's."""

    def do(self, work: Callable[[Call], T]) -> T:
        """`work(call)` in the thread the call belongs to, so that no hand-over is timed."""
        if self.executor is None:
            return work(self.call)
        return self.executor.submit(work, self.call).result()


def unfit(key: str, problem: Problem, device: str) -> str:
    """Why a contender has no part in this problem; empty where it has one."""
    if key == "benchmark" and device != "cuda":
        return "cudnn.benchmark is for GPUs only"
    if key == "channels_last" and problem.ndim == 1:
        return "1-D tensors have no channels_last layout"
    if key == "channels_last" and problem.channels_last:
        return "the input is channels_last already"
    return ""


def peers(
    against: Sequence[str], problem: Problem, device: str
) -> tuple[list[str], dict[str, str]]:
    """The names that take part, and why each other one asked for does not."""
    keys = [KEYS[name] for name in against]
    skipped = {key: reason for key in keys if (reason := unfit(key, problem, device))}
    return [key for key in keys if key not in skipped], skipped


def contender(
    key: str, inputs: Inputs, problem: Problem, grad_output: Tensor | None = None
) -> Contender:
    """The contender of that name on these inputs; "upconv" is one of them.

    With `grad_output` its call is the backward pass, of a forward pass made here.
    """
    from . import accuracy

    operator = accuracy.TORCH_OPERATORS[problem.ndim]
    if key == "upconv":
        operator = accuracy.upconv_operator(problem.ndim)
    elif key == "channels_last":
        inputs, grad_output = in_channels_last(inputs, grad_output)
    elif key == "compile":
        operator = compiled(operator)
    call = bound(inputs, operator, grad_output)
    if key == "benchmark":
        # PyTorch keeps the algorithms it chose, by search or not, in one table per thread: in the
        # thread of "torch" whoever came first would choose for both.
        return Contender(searched(call), ThreadPoolExecutor(1))
    return Contender(call)


def bound(inputs: Inputs, operator: Operator, grad_output: Tensor | None = None) -> Call:
    if grad_output is None:
        return lambda: (inputs.run(operator),)
    from .gradients import backward_call

    return backward_call(inputs, operator, grad_output)


def in_channels_last(inputs: Inputs, grad_output: Tensor | None) -> tuple[Inputs, Tensor | None]:
    import torch

    layout = torch.channels_last if inputs.x.dim() == 4 else torch.channels_last_3d
    x, weight = (tensor.to(memory_format=layout) for tensor in (inputs.x, inputs.weight))
    if grad_output is not None:
        grad_output = grad_output.to(memory_format=layout)
    return inputs._replace(x=x, weight=weight), grad_output


def compiled(operator: Operator) -> Operator:
    """For these sizes only, and from scratch: after eight sizes it would give up compiling."""
    import torch

    torch._dynamo.reset()
    return torch.compile(operator, dynamic=False)


def searched(call: Call) -> Call:
    """With cudnn.benchmark on during the call, and as it was after it."""
    import torch

    def searching() -> tuple[Tensor, ...]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            return call()
        finally:
            torch.backends.cudnn.benchmark = before

    return searching
