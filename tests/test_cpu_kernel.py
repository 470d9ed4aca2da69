"""The CPU kernel, compiled on its own and called through a C entry, against PyTorch in float64."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from upconv.planner import ATEN, Candidate, Hardware, Problem, Refusal, make_plan
from upconv.planner import cpu as planner

SOURCES = Path(planner.__file__).parents[1] / "csrc" / "cpu"
ENTRY = """
#include "fprop.h"
extern "C" bool run(const int64_t* params, int dtype, const void* x, const void* w,
                    const void* bias, void* y, int threads) {
  return upconv::cpu_fprop(params, static_cast<upconv::DType>(dtype), x, w, bias, y, threads);
}
"""
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ISAS = ["scalar", "avx2", "avx512"]
CONV = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
GUARD = 64
"""Elements of NaN on either side of every tensor: what is read or written there shows."""

Kernel = Callable[..., bool]


class Declined(Exception):
    """The kernel left the call to others."""


pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    folder = tmp_path_factory.mktemp("cpu_kernel")
    (folder / "entry.cpp").write_text(ENTRY)
    flags = ["-std=c++20", "-O3", "-fopenmp", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    compilers = [
        subprocess.Popen(
            ["g++", *flags, "-I", str(SOURCES), "-c", str(source), "-o", f"{source.stem}.o"],
            cwd=folder,
        )
        for source in [*sorted(SOURCES.glob("*.cpp")), folder / "entry.cpp"]
    ]
    assert [compiler.wait() for compiler in compilers] == [0] * len(compilers)
    objects = sorted(str(file) for file in folder.glob("*.o"))
    subprocess.run(
        ["g++", "-shared", "-fopenmp", *objects, "-o", "kernel.so"], cwd=folder, check=True
    )
    run = ctypes.CDLL(str(folder / "kernel.so")).run
    run.restype = ctypes.c_bool
    return run


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy with NaN before and after it."""
    memory = torch.full((tensor.numel() + 2 * GUARD,), float("nan"), dtype=tensor.dtype)
    inner = memory[GUARD : GUARD + tensor.numel()]
    inner.copy_(tensor.reshape(-1))
    return inner.view(tensor.shape)


def run_kernel(
    kernel: Kernel,
    problem: Problem,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    isa: str = "avx512",
    threads: int = 1,
    **changed: int,
) -> torch.Tensor:
    """The kernel's output; `changed` overrides named parameters (tile, chunk, threads)."""
    answer = planner.consider(problem, Hardware("cpu", threads=threads, isa=isa))
    assert isinstance(answer, Candidate)
    params = list(answer.params)
    for name, value in {"threads": threads, **changed}.items():
        params[planner.PARAMS_HEAD.index(name)] = value
    shape = (problem.batch, problem.out_channels, *problem.out_size)
    memory = torch.full((prod(shape) + 2 * GUARD,), float("nan"), dtype=x.dtype)
    operands = [guarded(x), guarded(w), None if bias is None else guarded(bias)]
    served = kernel(
        (ctypes.c_int64 * len(params))(*params),
        DTYPES.index(x.dtype),
        *(ctypes.c_void_p(None if t is None else t.data_ptr()) for t in operands),
        ctypes.c_void_p(memory[GUARD:].data_ptr()),
        threads,
    )
    assert memory[:GUARD].isnan().all(), "wrote before the output"
    assert memory[-GUARD:].isnan().all(), "wrote after the output"
    if not served:
        raise Declined
    return memory[GUARD:-GUARD].view(shape)


def operands(
    problem: Problem, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x = torch.randn(problem.batch, problem.in_channels, *problem.in_size).to(dtype)
    cout = problem.out_channels // problem.groups
    w = torch.randn(problem.in_channels, cout, *problem.kernel).to(dtype)
    bias = torch.randn(problem.out_channels).to(dtype) if problem.bias else None
    return x, w, bias


def assert_right(
    y: torch.Tensor,
    problem: Problem,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Within a few roundings of the sum of magnitudes, plus one rounding to the output's dtype."""
    conv = CONV[problem.ndim]
    rest = (
        problem.stride,
        problem.padding,
        problem.output_padding,
        problem.groups,
        problem.dilation,
    )
    wide = [None if t is None else t.double() for t in (x, w, bias)]
    exact = conv(*wide, *rest)
    magnitude = conv(*(None if t is None else t.abs() for t in wide), *rest)
    computed_in = torch.float64 if x.dtype == torch.float64 else torch.float32
    bound = 4 * torch.finfo(computed_in).eps * magnitude
    if x.dtype in (torch.bfloat16, torch.float16):
        info = torch.finfo(x.dtype)
        bound = bound + info.eps / 2 * exact.abs() * 1.01 + info.smallest_normal * info.eps
    wrong = ~((y.double() - exact).abs() <= bound)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} wrong for {problem}"


def draw(rng: random.Random) -> Problem:
    """A problem with every parameter drawn, output sizes of at least 1."""
    while True:
        ndim = rng.choice([1, 2, 2, 3])
        groups = rng.choice([1, 1, 1, 2, 3])
        size = [rng.randint(1, [260, 24, 8][ndim - 1]) for _ in range(ndim)]
        kernel = [rng.randint(1, 5) for _ in range(ndim)]
        stride = [rng.choice([1, 1, 2, 2, 3, 4, 9, 17]) for _ in range(ndim)]
        dilation = [rng.choice([1, 1, 2, 3]) for _ in range(ndim)]
        problem = Problem.of(
            rng.randint(1, 3),
            groups * rng.choice([1, 2, 3, 7, 8, 65]),
            groups * rng.choice([1, 2, 3, 4, 5, 7, 8, 9, 15, 22]),
            size,
            kernel,
            stride,
            [rng.randint(0, d * (k - 1) + 1) for d, k in zip(dilation, kernel, strict=True)],
            [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)],
            dilation,
            groups,
            bias=rng.random() < 0.5,
        )
        if min(problem.out_size) >= 1:
            return problem


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_drawn_problems(kernel: Kernel, isa: str, dtype: torch.dtype) -> None:
    rng = random.Random(f"{isa} {dtype}")
    torch.manual_seed(0)
    for _ in range(60):
        problem = draw(rng)
        x, w, bias = operands(problem, dtype)
        changed = {}
        if rng.random() < 0.5:  # cut finer than the planner would: many tiles, many chunks
            strip = planner.STRIP_BYTES // (8 if dtype == torch.float64 else 4)
            changed = {"tile": strip * rng.randint(1, 2), "chunk": 8 * rng.randint(1, 2)}
        y = run_kernel(kernel, problem, x, w, bias, isa, rng.choice([1, 2]), **changed)
        assert_right(y, problem, x, w, bias)


def every_small_problem() -> list[Problem]:
    return [
        Problem.of(2, 2, 3, (size,), kernel, stride, padding, output_padding, dilation)
        for size in (1, 2, 5)
        for kernel in (1, 2, 3, 4)
        for stride in (1, 2, 3)
        for dilation in (1, 2, 3)
        for padding in (0, 1, 3)
        for output_padding in range(max(stride, dilation))
        if (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding >= 0
    ]


@pytest.mark.parametrize("isa", ISAS)
def test_every_small_problem(kernel: Kernel, isa: str) -> None:
    torch.manual_seed(1)
    problems = every_small_problem()
    assert len(problems) > 400
    for problem in problems:
        x, w, bias = operands(problem, torch.float32)
        assert_right(run_kernel(kernel, problem, x, w, bias, isa), problem, x, w, bias)


@pytest.mark.parametrize(
    "problem",
    [
        Problem.of(3, 40, 24, (9, 7), 4, 2, 1),
        Problem.of(1, 130, 9, (33, 65), 3),
        Problem.of(2, 16, 16, (30, 40), (3, 5), (2, 3), (1, 2), 0, (2, 1), 4),
        Problem.of(1, 6, 6, (20, 20), 16, 8, 4, 0, 1, 6),
        Problem.of(2, 8, 12, (5, 6, 7), 3, 2, 1, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("isa", ISAS)
def test_bits_do_not_depend_on_threads_or_tiles(kernel: Kernel, isa: str, problem: Problem) -> None:
    torch.manual_seed(2)
    x, w, bias = operands(problem, torch.float32)
    first = run_kernel(kernel, problem, x, w, bias, isa)
    assert_right(first, problem, x, w, bias)
    for threads in (1, 2, 5):
        for tile in (96, 288):
            again = run_kernel(kernel, problem, x, w, bias, isa, threads, tile=tile, chunk=8)
            assert torch.equal(first, again)


@pytest.mark.parametrize("bias", [True, False])
def test_phases_without_taps_get_the_bias_or_zero(kernel: Kernel, bias: bool) -> None:
    problem = Problem.of(1, 3, 10, (4, 50), 1, (3, 5), 0, 2, bias=bias)
    x, w, b = operands(problem, torch.float32)
    y = run_kernel(kernel, problem, x, w, b)
    expected = torch.zeros(10) if b is None else b
    assert torch.equal(y[0, :, 1], expected[:, None].expand(10, y.shape[3]))
    assert torch.equal(y[0, :, 0, 1], expected)
    assert_right(y, problem, x, w, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_every_16_bit_number_converts_as_in_torch(
    kernel: Kernel, isa: str, dtype: torch.dtype
) -> None:
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    x = torch.stack([numbers, numbers.roll(4321)]).view(1, 2, -1)
    w = torch.tensor([1.0, 0.3]).to(dtype).view(2, 1, 1)
    problem = Problem.of(1, 2, 1, (65536,), 1, bias=False, dtype=str(dtype)[6:])
    y = run_kernel(kernel, problem, x, w, None, isa).flatten()
    wide = x.double()  # the sum is exact in float64, or beyond a 16-bit number's reach
    expected = (wide[0, 0] + wide[0, 1] * w[1, 0, 0].double()).float().to(dtype)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(0.0), expected.nan_to_num(0.0))


def numbers_of(dtype: torch.dtype, *bits: int) -> torch.Tensor:
    """Numbers by their bits; those of a shorter type are the upper ones of `bits`."""
    width = dtype.itemsize * 8
    wide = [pattern >> 64 - width for pattern in bits]
    signed = [value - (value >> width - 1 << width) for value in wide]
    return torch.tensor(signed, dtype=getattr(torch, f"int{width}")).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_declines_every_weight_that_is_infinite_or_nan(
    kernel: Kernel, isa: str, dtype: torch.dtype
) -> None:
    """Zeros between the rows are multiplied by weights, which must not make NaN of them."""
    problem = Problem.of(1, 18, 6, (5,), 3, groups=2, dtype=str(dtype)[6:])
    x, w, bias = operands(problem, dtype)
    infinity = float("inf")
    # The least NaN and the greatest: one bit of the fraction, and all bits.
    least = {torch.float32: 0x7F80_0001 << 32, torch.float64: 0x7FF0_0000_0000_0001}
    least |= {torch.bfloat16: 0x7F81 << 48, torch.float16: 0x7C01 << 48}
    nans = numbers_of(dtype, least[dtype], 2**64 - 1)
    assert nans.isnan().all()
    for place in range(w.numel()):
        bad = [infinity, -infinity, *nans][place % 4]
        poisoned = w.clone()
        poisoned.view(-1)[place] = bad
        with pytest.raises(Declined):
            run_kernel(kernel, problem, x, poisoned, bias, isa, 1 + place % 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_serves_every_finite_weight(kernel: Kernel, isa: str, dtype: torch.dtype) -> None:
    numbers = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
    if dtype == torch.float16:
        numbers = numbers.view(dtype)
    w = numbers.to(dtype)
    w = torch.cat([w[w.isfinite()], torch.tensor([1, -1], dtype=dtype) * torch.finfo(dtype).max])
    problem = Problem.of(1, 1, len(w), (1,), 1, bias=False, dtype=str(dtype)[6:])
    x = torch.ones(1, 1, 1, dtype=dtype)
    y = run_kernel(kernel, problem, x, w.view(1, -1, 1), None, isa)
    assert torch.equal(y.flatten(), w)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["input", "bias"])
@pytest.mark.parametrize("isa", ISAS)
def test_inputs_and_biases_may_be_infinite_or_nan(
    kernel: Kernel, isa: str, where: str, value: float
) -> None:
    """They reach those outputs that they have a part in, and no others."""
    torch.manual_seed(3)
    for problem in (
        Problem.of(2, 9, 5, (5, 6), 3, 2, 1),
        Problem.of(1, 4, 6, (3, 4, 5), (3, 2, 3), (1, 2, 1), 1, dilation=(2, 1, 1), groups=2),
        Problem.of(2, 3, 2, (20,), 5, 1, 1),
    ):
        x, w, bias = operands(problem, torch.float32)
        assert bias is not None
        poisoned = x if where == "input" else bias
        poisoned.view(-1)[poisoned.numel() // 2] = value
        y = run_kernel(kernel, problem, x, w, bias, isa)
        expected = CONV[problem.ndim](
            x.double(),
            w.double(),
            bias.double(),
            problem.stride,
            problem.padding,
            problem.output_padding,
            problem.groups,
            problem.dilation,
        )
        assert not expected.isfinite().all()
        assert expected.isfinite().any()
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-4, equal_nan=True)


@pytest.mark.slow
def test_more_than_two_to_the_31_outputs(kernel: Kernel) -> None:
    pages = Path("/proc/meminfo")
    if not pages.exists() or int(re.findall(r"MemAvailable: +(\d+)", pages.read_text())[0]) < 9e6:
        pytest.skip("needs 9 GB of free memory")
    problem = Problem.of(1, 1, 1, (1449, 1449), 1, 32, 0, 31, bias=True, dtype="bfloat16")
    assert prod(problem.out_size) > 2**31
    x, w, bias = operands(problem, torch.bfloat16)
    y = run_kernel(kernel, problem, x, w, bias, threads=2)[0, 0]
    expected = (x.float() * w.float() + bias.float()).bfloat16()[0, 0]
    assert torch.equal(y[::32, ::32], expected)
    assert (y[1::32] == bias).all()
    assert (y[-32, 1:32] == bias).all()


# ------------------------------------------------------------------------------------- planner


def test_parameters_have_the_places_that_the_header_names() -> None:
    header = (SOURCES / "fprop.h").read_text()
    places = {name: int(place) for name, place in re.findall(r"^  k(\w+) = (\d+)", header, re.M)}
    assert places.pop("PhaseLists") == len(planner.PARAMS_HEAD)
    ours = {}
    for place, name in enumerate(planner.PARAMS_HEAD):
        stem = name.partition("[")[0].title().replace("_", "")
        ours.setdefault(stem, place)
    assert places == ours


def test_constants_agree_with_the_sources() -> None:
    job = (SOURCES / "fprop_job.h").read_text()
    assert "kStripBytes = 6 * 64;" in job
    assert planner.STRIP_BYTES == 6 * 64
    for name, code in (("avx2", 1), ("avx512", 2)):
        text = (SOURCES / f"fprop_{name}.cpp").read_text()
        assert f"UPCONV_VECTOR_BYTES {planner.VECTOR_BYTES[code]}\n" in text
        assert planner.ISA[name] == code


def test_phase_lists_can_be_read_back() -> None:
    problem = Problem.of(2, 8, 6, (9, 12), (3, 5), (2, 3), (1, 2), 0, (2, 1), 2)
    answer = planner.consider(problem, Hardware("cpu", threads=2, isa="avx2"))
    assert isinstance(answer, Candidate)
    rest = list(answer.params[len(planner.PARAMS_HEAD) :])
    read = []
    for _ in range(3):
        dimension = []
        for _ in range(rest.pop(0)):
            first, count, taps = (rest.pop(0) for _ in range(3))
            dimension.append((first, count, [(rest.pop(0), rest.pop(0)) for _ in range(taps)]))
        read.append(dimension)
    assert rest == []
    assert read[0] == [(0, 1, [(0, 0)])]
    for dimension, phases in zip(read[1:], make_plan(problem, Hardware("cpu")).phases, strict=True):
        assert dimension == [(p.first, p.count, [(t.k, t.shift) for t in p.taps]) for p in phases]


CPU = Hardware("cpu", threads=2, isa="avx512")


def test_refuses_other_devices_and_channels_last() -> None:
    problem = Problem.of(1, 8, 8, (8, 8), 3)
    assert isinstance(planner.consider(problem, Hardware("cuda")), Refusal)
    nhwc = Problem.of(1, 8, 8, (8, 8), 3, channels_last=True)
    answer = planner.consider(nhwc, CPU)
    assert isinstance(answer, Refusal)
    assert "channels_last" in answer.reason


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (Problem.of(2, 128, 64, (64, 64), 2, 2), planner.KERNEL),
        (Problem.of(1, 64, 64, (128, 128), 3), planner.KERNEL),
        (Problem.of(1, 64, 64, (40, 40), 4, 2, 1, groups=64), planner.KERNEL),
        # Taps that reach far beyond a small image: most of what we would compute is padding.
        (Problem.of(1, 512, 8, (100, 8), 7, 2, 3, 0, 3), ATEN),
        (Problem.of(4, 512, 256, (1, 1), 7, 1), ATEN),
    ],
    ids=str,
)
def test_takes_the_faster_by_the_estimates(problem: Problem, expected: str) -> None:
    plan = make_plan(problem, CPU)
    assert plan.kernel == expected
    if expected == ATEN:
        reasons = [r.reason for r in plan.refused if r.kernel == planner.KERNEL]
        assert len(reasons) == 1
        assert "slower here" in reasons[0]
        assert "PyTorch" in plan.chosen.notes[0]


def test_a_forced_kernel_is_taken_whatever_it_costs() -> None:
    problem = Problem.of(1, 512, 8, (100, 8), 7, 2, 3, 0, 3)
    assert make_plan(problem, CPU, forced=planner.KERNEL).kernel == planner.KERNEL
    assert make_plan(Problem.of(1, 64, 64, (128, 128), 3), CPU, forced=ATEN).kernel == ATEN
