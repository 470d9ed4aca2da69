"""The operators: differentiation, transforms, tracing, and the border to the compiled side."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import operator_checks as checks
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import upconv
from upconv import ops, plans, recording
from upconv.jit import load

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library loaded, and its kernel used wherever it is legal.

    One thread: finite differences are thousands of tiny calls, and on a machine that is busy
    otherwise, threads that wait for each other take 20 times as long.
    """
    assert load("cpu").ok
    monkeypatch.setattr(recording, "WORTH_RECORDING_US", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ops.forced("cpu_fprop"):
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_gradients_of_first_and_second_order(ndim: int) -> None:
    checks.check_gradients(ndim)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("way", ["public", "operator"])
def test_function_transforms_give_pytorchs_answer(ndim: int, way: str) -> None:
    checks.check_transforms(ndim, getattr(checks, way)(ndim))


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("way", ["public", "operator"])
def test_function_transforms_add_the_bias_to_its_channels(ndim: int, way: str) -> None:
    checks.check_transforms_of_the_bias(ndim, getattr(checks, way)(ndim))


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_opcheck(ndim: int) -> None:
    checks.check_opcheck(ndim)


def test_all_of_this_holds_before_anything_is_built() -> None:
    environment = os.environ | {
        "UPCONV_BACKEND": "aten",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TESTS.parent),
    }
    done = subprocess.run(
        [sys.executable, str(TESTS / "operator_checks.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "unbuilt: all well" in done.stdout


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_weights_that_are_infinite_or_nan_are_pytorchs(ndim: int, value: float) -> None:
    """Outputs that such a weight has no part in stay finite, recorded or not."""
    given = [t.detach() for t in checks.tensors(ndim)]
    given[1].view(-1)[0] = value
    expected = checks.THEIRS[ndim](*given, *checks.PARAMETERS[ndim])
    assert expected.isfinite().any()
    assert not expected.isfinite().all()
    for recorded in (False, True):
        tensors = [t.clone().requires_grad_(recorded) for t in given]
        output = checks.public(ndim)(*tensors, *checks.PARAMETERS[ndim])
        assert output.requires_grad == recorded
        torch.testing.assert_close(output.detach(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_only_the_gradients_asked_for_are_computed(
    wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("aten_input_gradient", "aten_weight_gradient", "bias_gradient"):
        original = getattr(ops.autograd, name)
        monkeypatch.setattr(
            ops.autograd,
            name,
            lambda *given, name=name, original=original: calls.append(name) or original(*given),
        )
    given = [t.detach().float() for t in checks.tensors(2)]
    for index in wanted:
        given[index].requires_grad_()
    output = upconv.conv_transpose2d(*given, *checks.PARAMETERS[2])
    saved = [t for t in output.grad_fn.saved_tensors if t is not None]
    assert len(saved) == len({0, 1} & set(wanted))
    output.sum().backward()
    names = ("aten_input_gradient", "aten_weight_gradient", "bias_gradient")
    assert sorted(calls) == sorted(names[index] for index in wanted)
    assert [t.grad is not None for t in given] == [index in wanted for index in range(3)]


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("which", ["neither", "input", "weight", "both"])
@pytest.mark.parametrize("batched", [True, False])
def test_real_fake_and_pytorchs_strides_agree(
    ndim: int, dtype: torch.dtype, which: str, batched: bool
) -> None:
    x, w, b = (t.detach().to(dtype) for t in checks.tensors(ndim))
    x, w = x.repeat_interleave(2, dim=-1), w.repeat_interleave(2, dim=-1)
    if which in ("input", "both"):
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    if which in ("weight", "both"):
        w = w.movedim(1, -1).contiguous().movedim(-1, 1)
    x = x if batched else x[0]
    rest = checks.PARAMETERS[ndim]
    theirs = checks.THEIRS[ndim](x, w, b, *rest)
    ours = checks.operator(ndim)(x, w, b, *rest)
    assert ours.stride() == theirs.stride()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = checks.operator(ndim)(*(mode.from_tensor(t) for t in (x, w, b)), *rest)
    assert fake.stride() == ours.stride()
    assert fake.shape == ours.shape
    assert fake.dtype == ours.dtype


@pytest.mark.parametrize("which", ["input", "weight"])
def test_gradients_of_channels_last_are_channels_last(which: str) -> None:
    x, w = torch.randn(2, 4, 5, 6), torch.randn(4, 6, 3, 3)
    x, w = (
        t.to(memory_format=torch.channels_last) if name == which else t
        for t, name in ((x, "input"), (w, "weight"))
    )
    x.requires_grad_()
    w.requires_grad_()
    for gradients in (
        torch.autograd.grad(f(x, w).sin().sum(), (x, w))
        for f in (F.conv_transpose2d, torch.ops.upconv.conv_transpose2d)
    ):
        for gradient in gradients:
            assert gradient.is_contiguous(memory_format=torch.channels_last)


class TestAutocast:
    @pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_dtypes_as_pytorch(self, given: torch.dtype, dtype: torch.dtype) -> None:
        x, w, b = (t.detach().to(given).requires_grad_() for t in checks.tensors(2))
        with torch.autocast("cpu", dtype=dtype):
            ours = checks.operator(2)(x, w, b, *checks.PARAMETERS[2])
            theirs = F.conv_transpose2d(x, w, b, *checks.PARAMETERS[2])
        assert ours.dtype == theirs.dtype == (torch.float64 if given == torch.float64 else dtype)
        torch.testing.assert_close(ours, theirs, atol=0.1, rtol=0.02)
        mine, their = (torch.autograd.grad(y.sum(), (x, w, b)) for y in (ours, theirs))
        for a, e in zip(mine, their, strict=True):
            assert a.dtype == e.dtype == given
            torch.testing.assert_close(a, e, atol=0.1, rtol=0.02)

    def test_float64_with_float32_stays_an_error(self) -> None:
        x, w, _ = checks.tensors(2)
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError):
            checks.operator(2)(x, w.float())


class TestTracing:
    @pytest.mark.parametrize(
        "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow])]
    )
    def test_compile_in_one_graph_with_dynamic_sizes(self, backend: str) -> None:
        torch._dynamo.reset()
        layer = upconv.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1)
        graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
        compiled = torch.compile(
            lambda x: layer(x).relu() * 2, fullgraph=True, dynamic=True, backend=graphs
        )
        for batch, height, width in ((2, 5, 6), (3, 7, 4), (5, 9, 9)):
            x = torch.randn(batch, 4, height, width, requires_grad=True)
            expected = super(upconv.ConvTranspose2d, layer).forward(x).relu() * 2
            result = compiled(x)
            torch.testing.assert_close(result, expected)
            parameters = (x, layer.weight, layer.bias)
            mine = torch.autograd.grad(result.square().sum(), parameters)
            theirs = torch.autograd.grad(expected.square().sum(), parameters)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert graphs.frame_count == 1
        targets = [str(n.target) for g in graphs.graphs for n in g.graph.nodes]
        assert "upconv.conv_transpose2d.default" in targets

    def test_compile_with_a_dynamic_output_size(self) -> None:
        torch._dynamo.reset()
        layer = upconv.ConvTranspose2d(4, 6, 3, stride=2, padding=1)

        def up(x: Tensor, like: Tensor) -> Tensor:
            return layer(x, output_size=like.shape[2:])

        compiled = torch.compile(up, fullgraph=True, dynamic=True, backend="aot_eager")
        for size in (5, 7, 8):
            x = torch.randn(2, 4, size, size)
            for extra in (0, 1):
                like = torch.empty(2, 1, 2 * size - 1 + extra, 2 * size - 1 + extra)
                torch.testing.assert_close(compiled(x, like), up(x, like))

    @pytest.mark.parametrize("strict", [True, False])
    def test_export_keeps_the_operator(self, strict: bool) -> None:
        layer = upconv.ConvTranspose3d(2, 4, 3, stride=2, groups=2).eval()
        batch, depth = torch.export.Dim("batch", min=2), torch.export.Dim("depth", min=2)
        program = torch.export.export(
            layer,
            (torch.randn(2, 2, 4, 5, 6),),
            dynamic_shapes=({0: batch, 2: depth},),
            strict=strict,
        )
        assert any("upconv.conv_transpose3d" in str(n.target) for n in program.graph.nodes)
        x = torch.randn(3, 2, 7, 5, 6)
        torch.testing.assert_close(program.module()(x), layer(x))

    def test_bad_output_padding_is_found_while_tracing(self) -> None:
        with torch._subclasses.FakeTensorMode(), pytest.raises(RuntimeError, match="smaller than"):
            checks.operator(1)(
                torch.empty(1, 2, 5), torch.empty(2, 2, 3), None, [2], [0], [2], 1, [1]
            )

    def test_jit_trace(self) -> None:
        layer = upconv.ConvTranspose2d(4, 6, 3)
        traced = torch.jit.trace(layer, torch.randn(1, 4, 5, 5))
        x = torch.randn(2, 4, 7, 5)
        torch.testing.assert_close(traced(x), layer(x))

    def test_make_fx_with_symbolic_sizes(self) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        x, w = torch.randn(2, 4, 5, 5), torch.randn(4, 6, 3, 3)
        graph = make_fx(
            lambda x, w: upconv.conv_transpose2d(x, w, stride=2), tracing_mode="symbolic"
        )(x, w)
        y = torch.randn(3, 4, 8, 6)
        torch.testing.assert_close(graph(y, w), F.conv_transpose2d(y, w, stride=2))


class TestSubclassesAndModes:
    def test_foreign_subclass_goes_to_pytorch(self) -> None:
        """One that knows PyTorch's operators, and nothing of ours."""
        seen = []

        class Wrapper(torch.Tensor):
            @staticmethod
            def __new__(cls, inner: Tensor) -> Wrapper:
                return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

            def __init__(self, inner: Tensor) -> None:
                self.inner = inner

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                seen.append(str(func))
                if "upconv" in str(func):
                    raise NotImplementedError("only ATen is known here")
                plain = [a.inner if isinstance(a, Wrapper) else a for a in args]
                return func(*plain, **(kwargs or {}))

        x, w = torch.randn(1, 4, 5, 5), torch.randn(4, 6, 3, 3)
        for call in (upconv.conv_transpose2d, torch.ops.upconv.conv_transpose2d):
            torch.testing.assert_close(call(Wrapper(x), w), F.conv_transpose2d(x, w))
        assert any("aten.convolution" in name for name in seen)

    def test_inference_mode(self) -> None:
        x, w, b = checks.tensors(2)
        with torch.inference_mode():
            y = upconv.conv_transpose2d(x, w, b, *checks.PARAMETERS[2])
        assert y.is_inference()
        torch.testing.assert_close(y, F.conv_transpose2d(x, w, b, *checks.PARAMETERS[2]).detach())

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int64])
    def test_other_dtypes_by_pytorch(self, dtype: torch.dtype) -> None:
        x, w = (5 * torch.randn(2, 4, 5, 5)).to(dtype), (5 * torch.randn(4, 6, 3, 3)).to(dtype)
        for call in (upconv.conv_transpose2d, torch.ops.upconv.conv_transpose2d):
            torch.testing.assert_close(call(x, w), F.conv_transpose2d(x, w))
        if dtype.is_complex:
            x.requires_grad_()
            mine, theirs = (
                torch.autograd.grad(f(x, w).abs().sum(), x)
                for f in (torch.ops.upconv.conv_transpose2d, F.conv_transpose2d)
            )
            torch.testing.assert_close(mine, theirs)

    def test_negative_and_conjugate_views(self) -> None:
        z = torch.randn(2, 4, 5, 5, dtype=torch.complex64)
        w = torch.randn(4, 6, 3, 3)
        x = z.conj().imag
        assert x.is_neg()
        torch.testing.assert_close(
            torch.ops.upconv.conv_transpose2d(x, w), F.conv_transpose2d(x, w)
        )


class TestBorderToTheCompiledSide:
    """Keys, records and exceptions on their way between C++ and Python."""

    header = (TESTS.parent / "upconv/csrc/binding/common.h").read_text()

    def test_key_layout(self) -> None:
        for enum, expected in (
            ("KeyField", [*plans.KEY_HEADER, "header"]),
            ("KeyList", [*plans.KEY_LISTS, "lists"]),
        ):
            body = re.search(rf"enum {enum} : int \{{(.*?)\}};", self.header, re.S)
            assert body
            fields = re.findall(r"k(?:Key|List)(\w+) = (\d+)", body[1])
            assert [int(number) for _, number in fields] == list(range(len(expected)))
            names = [re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name, _ in fields]
            assert names == expected

    def test_numbers_of_kernels_devices_and_dtypes(self) -> None:
        kernels = re.search(r"enum KernelId : int64_t \{(.*?)\}", self.header, re.S)
        devices = re.search(r"enum DeviceKind : int64_t \{(.*?)\}", self.header, re.S)
        dtypes = re.findall(r"case at::k(\w+):\s+return (\d);", self.header)
        assert kernels
        assert devices
        snake = {
            re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): int(number)
            for name, number in re.findall(r"k(\w+) = (\d+)", kernels[1])
        }
        assert snake == plans.KERNEL_IDS
        assert re.findall(r"k(\w+) = (\d)", devices[1]) == [
            (name.capitalize(), str(i)) for i, name in enumerate(plans.DEVICE_KINDS)
        ]
        torch_names = {"Float": "float32", "Double": "float64", "Half": "float16"}
        given = {torch_names.get(n, n.lower()): int(number) for n, number in dtypes}
        assert given == {name: index for index, name in enumerate(plans.DTYPES)}

    @pytest.mark.parametrize("ndim", [1, 2, 3])
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last", "expanded"])
    @pytest.mark.parametrize("batched", [True, False])
    def test_both_sides_make_the_same_key(
        self, ndim: int, layout: str, batched: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from strategies import arranged

        keys: list[list[int]] = []
        record = plans.record
        monkeypatch.setattr(plans, "record", lambda key: keys.append(list(key)) or record(key))
        x, w, b = (t.detach().bfloat16() for t in checks.tensors(ndim))
        x = arranged(x, layout)
        x = x if batched else x[0]
        stride, padding, extra, groups, dilation = checks.PARAMETERS[ndim]
        checks.operator(ndim)(x, w, b, *checks.PARAMETERS[ndim])
        lists = [stride, padding, extra, dilation]
        assert keys == [plans.key_of(ndim, x, w, b, lists, groups)]

    def test_a_seen_call_asks_nothing_of_python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, w = torch.randn(1, 4, 5, 5), torch.randn(4, 6, 3, 3)
        first = torch.ops.upconv.conv_transpose2d(x, w)
        monkeypatch.setattr(plans, "record", lambda key: pytest.fail("asked again"))
        assert torch.equal(torch.ops.upconv.conv_transpose2d(x, w), first)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda record: [],
            lambda record: [99],
            lambda record: record[:5],
            lambda record: record[:-1],
            lambda record: [*record, 0],
            lambda record: [record[0], record[1], record[2] + 1, *record[3:]],
        ],
    )
    def test_records_that_do_not_fit_are_refused(self, spoil, monkeypatch) -> None:  # type: ignore[no-untyped-def]
        record = plans.record
        monkeypatch.setattr(plans, "record", lambda key: spoil(record(key)))
        with pytest.raises(RuntimeError, match="planner"):
            torch.ops.upconv.conv_transpose2d(torch.randn(1, 4, 5, 5), torch.randn(4, 6, 3, 3))

    @pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, NotImplementedError])
    def test_python_exceptions_keep_their_type(
        self, error: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(key: list[int]) -> list[int]:
            raise error("from the planner")

        monkeypatch.setattr(plans, "record", refuse)
        with pytest.raises(error, match="from the planner"):
            torch.ops.upconv.conv_transpose2d(torch.randn(1, 4, 5, 5), torch.randn(4, 6, 3, 3))

    def test_many_threads_with_new_and_old_keys(self) -> None:
        w = torch.randn(4, 6, 3, 3)
        inputs = [torch.randn(1, 4, 3 + i % 7, 3 + i % 5) for i in range(200)]

        def call(x: Tensor) -> bool:
            if x.shape[2] == 5:
                ops.clear_plans()
            ours = torch.ops.upconv.conv_transpose2d(x, w)
            return torch.allclose(ours, F.conv_transpose2d(x, w), atol=1e-5)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(call, inputs))

    def test_thread_count_is_part_of_the_plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys: list[list[int]] = []
        record = plans.record
        monkeypatch.setattr(plans, "record", lambda key: keys.append(list(key)) or record(key))
        x, w = torch.randn(1, 4, 5, 5), torch.randn(4, 6, 3, 3)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.ops.upconv.conv_transpose2d(x, w)
        assert [key[plans.KEY_HEADER.index("threads")] for key in keys] == [1, 2]


class TestGradientOperators:
    def test_sizes_that_do_not_fit_are_refused(self) -> None:
        gy, w, x = torch.randn(1, 6, 7, 7), torch.randn(4, 6, 3, 3), torch.randn(1, 4, 5, 5)
        rest = ([1], [0], [0], 1, [1])
        with pytest.raises(RuntimeError, match="expected grad_output of size"):
            torch.ops.upconv.conv_transpose_grad_input(gy, w, [1, 4, 6, 5], *rest)
        with pytest.raises(RuntimeError, match="expected grad_output of size"):
            torch.ops.upconv.conv_transpose_grad_weight(gy, x, [4, 6, 3, 2], *rest)

    def test_output_padding_of_at_least_the_stride(self) -> None:
        """Legal where the dilation is larger; a plain convolution then has outputs to spare."""
        x = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)
        w = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
        rest = ((1, 2), (0, 1), (2, 2), 1, (3, 3))
        mine, theirs = (
            torch.autograd.grad(f(x, w, None, *rest).sin().sum(), (x, w))
            for f in (torch.ops.upconv.conv_transpose2d, F.conv_transpose2d)
        )
        torch.testing.assert_close(mine, theirs)


def test_each_gradient_on_a_gpu_asks_for_its_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's gradient has one of its own, which inference never builds."""
    asked: list[str] = []
    plan = SimpleNamespace(kernel="some kernel of ours")
    monkeypatch.setattr(plans, "plan_of", lambda _: plan)
    monkeypatch.setattr(ops, "serve", lambda kind: bool(asked.append(kind)))
    rest = ([1], [0], [0], 1, [1])
    with FakeTensorMode():
        grad_output = torch.empty(2, 4, 5, 5, device="cuda")
        x, w = torch.empty(2, 3, 3, 3, device="cuda"), torch.empty(3, 4, 3, 3, device="cuda")
        assert ops._gradient_unbuilt("grad_weight", grad_output, x, w.shape, *rest).shape == w.shape
        assert ops._gradient_unbuilt("grad_input", grad_output, w, x.shape, *rest).shape == x.shape
    assert asked == ["cuda_wgrad", "cuda"]
