"""What the tests of every GPU kernel ask of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from upconv import ops, plans
from upconv.checks import expand
from upconv.planner import H200, Problem, make_plan


def serving(ndim: int, x: torch.Tensor, w: torch.Tensor, *rest: object) -> str:
    """The kernel that the plan of this call names: PyTorch's where the one asked for refuses."""
    values = [None, 1, 0, 0, 1, 1]
    values[: len(rest)] = rest
    b, stride, padding, output_padding, groups, dilation = values
    lists = [
        expand("", [v] if isinstance(v, int) else v, ndim)
        for v in (stride, padding, output_padding, dilation)
    ]
    key = plans.key_of(ndim, x, w, b, lists, groups)
    plan = None if key is None else plans.plan_of(key)
    return "aten" if plan is None else plan.kernel


@contextmanager
def precision(of_float32: str) -> Iterator[None]:
    """Inside, "ieee": float32 must not be rounded to TF32; "tf32": it may be."""
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = of_float32
    try:
        yield
    finally:
        conv.fp32_precision = before


def check_same(result: torch.Tensor, again: torch.Tensor) -> None:
    """Two runs have the same bits. If not, where they differ says more than that they do."""
    if torch.equal(result, again):
        return
    places = (result != again).nonzero()
    first, last = (tuple(places[i].tolist()) for i in (0, -1))
    apart = (result.double() - again.double()).abs().nan_to_num(0.0)
    widest = tuple((apart == apart.max()).nonzero()[0].tolist())
    raise AssertionError(
        f"two runs differ in {len(places)} of {result.numel()} numbers, from {first} to {last}:"
        f" {result[first]} and {again[first]}, at most {result[widest]} and {again[widest]};"
        f" {int(result.isnan().sum())} and {int(again.isnan().sum())} are NaN"
    )


def distance(y: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the norm of what is expected; infinite where y has a NaN."""
    assert y.shape == expected.shape
    if not bool(torch.isfinite(y).all()):
        return float("inf")
    return float((y.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def poison(shape: torch.Size, dtype: torch.dtype) -> None:
    """Leaves NaNs in the memory that the next allocation of this size will get.

    And in all shared memory, where a zero times what was never written there would be one.
    """
    torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    shared_memory_filler()()


def between_nans(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, with NaN before and behind them in memory."""
    count = torch.Size(shape).numel()
    around = torch.full((count + 8192,), float("nan"), device="cuda", dtype=dtype)
    return around[4096 : 4096 + count].view(shape).normal_()


FILL = """
extern "C" __global__ void fill(int words) {
  extern __shared__ volatile unsigned int memory[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = ~0u;
}
"""


@cache
def shared_memory_filler() -> Callable[[], None]:
    """Fills all shared memory of the GPU with bits that are a NaN in every type."""
    properties = torch.cuda.get_device_properties()
    size = properties.shared_memory_per_block_optin
    kernel = torch.cuda._compile_kernel(FILL, "fill")
    kernel.set_shared_memory_config(size)
    # A block takes a whole multiprocessor: four times as many blocks leave none out.
    grid = (4 * properties.multi_processor_count, 1, 1)
    return lambda: kernel(grid, (256, 1, 1), [size // 4], size)


@contextmanager
def allocations() -> Iterator[list[int]]:
    """How often memory was asked for meanwhile, and how many bytes in all."""
    names = ("allocation.all.allocated", "requested_bytes.all.allocated")
    taken = [-torch.cuda.memory_stats()[name] for name in names]
    yield taken
    for index, name in enumerate(names):
        taken[index] += torch.cuda.memory_stats()[name]


def check_weight_gradients(problem: Problem, kernel: str, seed: int, limit: float) -> None:
    """The weight's gradient by a kernel equals that in float64, by itself and with the bias's."""
    torch.manual_seed(seed)
    assert make_plan(problem, H200, kernel).kernel == kernel
    ndim, dtype = problem.ndim, getattr(torch, problem.dtype)
    x = between_nans((problem.batch, problem.in_channels, *problem.in_size), dtype)
    gy = between_nans((problem.batch, problem.out_channels, *problem.out_size), dtype)
    shape = torch.Size((problem.in_channels, problem.out_channels, *problem.kernel))
    rest = (problem.stride, problem.padding, problem.output_padding, 1, (1,) * ndim)
    with torch.no_grad(), ops.forced(kernel):
        torch.full((32 * 2**20,), float("nan"), device="cuda")  # the workspace's memory
        poison(shape, dtype)
        alone = ops.GRADIENTS["grad_weight"](gy, x, shape, *rest)
        both, again = (
            torch.ops.upconv._grad_weight_and_bias(gy, x, shape, *rest) for _ in range(2)
        )
    wanted = ops._aten_gradient("grad_weight", gy.double(), x.double(), shape, *rest)
    sums = gy.double().sum([0, *range(2, ndim + 2)])
    for each in zip(both, again, strict=True):
        check_same(*each)
    assert distance(both[0], wanted) <= limit
    assert distance(alone, wanted) <= limit
    assert distance(both[1], sums) <= (1e-6 if dtype == torch.float32 else limit)
