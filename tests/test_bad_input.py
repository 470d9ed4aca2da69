"""Bad input gets PyTorch's exception type and words at least as clear, before anything is computed.

Every row is given to PyTorch as well: a row that PyTorch accepts, or refuses with another type, is
a wrong row. `words` must be in our message; where PyTorch's own message is usable they are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import upconv
from upconv import ops

THEIRS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
OURS = {1: upconv.conv_transpose1d, 2: upconv.conv_transpose2d, 3: upconv.conv_transpose3d}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Row(NamedTuple):
    """`change(ndim, arguments)` spoils the arguments of a good call."""

    name: str
    change: Callable[[int, dict[str, Any]], dict[str, Any]]
    words: str
    theirs: str | None = ""
    """What PyTorch's message has, where not `words`; None where PyTorch returns garbage."""


def put(**values: Any) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Replace arguments; a function is called with the number of dimensions and the old value."""

    def change(ndim: int, given: dict[str, Any]) -> dict[str, Any]:
        new = {k: v(ndim, given.get(k)) if callable(v) else v for k, v in values.items()}
        return given | new

    return change


def rand(*shape: int) -> Callable[[int, Tensor], Tensor]:
    """Of the old tensor's dtype; the last size is repeated for every dimension."""
    return lambda ndim, old: torch.randn(*shape[:-1], *[shape[-1]] * ndim).to(old.dtype)


def bias(*shape: int) -> Callable[[int, Tensor], Tensor]:
    return lambda ndim, old: torch.zeros(shape)


ONEDNN = "primitive|memory descriptor|dimensions are invalid"
ROWS = (
    Row("rank too low", put(input=lambda n, x: x[0, 0]), r"Expected \dD \(unbatched\) or \dD"),
    Row("rank too high", put(input=lambda n, x: x[None]), r"Expected \dD \(unbatched\) or \dD"),
    Row(
        "weight rank too low",
        put(weight=lambda n, w: w[..., 0]),
        "Expected .-dimensional weight .*got weight of size",
        "at least three|expected stride to be",
    ),
    Row(
        "weight rank too high",
        put(weight=lambda n, w: w[..., None]),
        "Expected .-dimensional weight .*got weight of size",
        "Expected 4-dimensional input|expected stride to be",
    ),
    Row("channels", put(input=rand(2, 5, 5)), "to have 4 channels, but got 5 channels instead"),
    Row("channels, unbatched", put(input=rand(5, 5)), "to have 4 channels, but got 5 channels"),
    Row("bias length", put(bias=bias(5)), "expected bias to be 1-dimensional with 6 elements"),
    Row("bias rank", put(bias=bias(1, 6)), "expected bias to be 1-dimensional with 6 elements"),
    Row("bias scalar", put(bias=bias()), "expected bias to be 1-dimensional with 6 elements"),
    Row("groups 0", put(groups=0), "non-positive groups is not supported"),
    Row("groups negative", put(groups=-1), "non-positive groups is not supported"),
    Row("groups 3", put(groups=3), "Given groups=3, expected weight to be divisible by 3 at"),
    Row("stride 0", put(stride=0), "non-positive stride is not supported"),
    Row("stride negative", put(stride=-2), "non-positive stride is not supported"),
    Row("padding negative", put(padding=-1), "negative padding is not supported"),
    Row("output_padding negative", put(output_padding=-1), "negative output_padding is not"),
    Row("dilation negative", put(dilation=-1), "dilation should be greater than zero"),
    Row(
        "dilation 0", put(dilation=0), "dilation should be greater than zero", f"dilation|{ONEDNN}"
    ),
    *(
        Row(
            f"{name} of length {length}",
            put(**{name: (lambda n, _, k=kind: [1] * (n + 1) if k else [])}),
            f"expected {name} to be a single integer value or a list of . values to match",
        )
        for name in ("stride", "padding", "dilation", "output_padding")
        for kind, length in ((1, "ndim + 1"), (0, "0"))
    ),
    Row(
        "output_padding too big",
        put(output_padding=2, stride=2),
        "output padding must be smaller than either stride or dilation, but got output_padding_",
    ),
    Row(
        "output size negative",
        put(padding=4),
        "Calculated output size per channel: .*Output size is too small",
        f"Output size is too small|{ONEDNN}",
    ),
    Row("zero spatial", put(input=rand(2, 4, 0)), "Only zero batch or zero channel inputs"),
    Row(
        "zero input channels",
        put(input=rand(2, 0, 5), weight=rand(0, 6, 3)),
        "Given groups=1, expected weight to be at least 1 at dimension 0",
    ),
    Row(
        "zero output channels",
        put(weight=rand(4, 0, 3)),
        "non-empty weight tensor expected",
        f"non-empty|{ONEDNN}",
    ),
    Row(
        "kernel size 0",
        put(weight=rand(4, 6, 0)),
        "kernel size should be greater than zero",
        f"kernel size|non-empty|{ONEDNN}",
    ),
    Row("weight on meta", put(weight=lambda n, w: w.to("meta")), "weight on meta", None),
    Row("bias on meta", put(bias=torch.zeros(6, device="meta")), "bias on meta", None),
)


def good(ndim: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "input": torch.randn(2, 4, *[5] * ndim).to(dtype),
        "weight": torch.randn(4, 6, *[3] * ndim).to(dtype),
    }


def refusal(function: Callable[..., Tensor], arguments: dict[str, Any]) -> Exception | None:
    try:
        function(**arguments)
    except Exception as error:
        return error
    return None


def by_position(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """PyTorch names an argument's position when it was given by position."""
    defaults = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1}
    order = ("input", "weight", *defaults, "dilation")

    def call(**given: Any) -> Tensor:
        values = defaults | {"dilation": 1} | given
        return function(*(values[name] for name in order))

    return call


def as_bias_dtype(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    if isinstance(arguments.get("bias"), Tensor):
        return arguments | {"bias": arguments["bias"].to(dtype)}
    return arguments


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(row: Row, ndim: int, dtype: torch.dtype) -> None:
    arguments = as_bias_dtype(row.change(ndim, good(ndim, dtype)), dtype)
    if row.theirs is not None:
        theirs = refusal(THEIRS[ndim], arguments)
        assert theirs is not None, "PyTorch accepts this"
        assert type(theirs) is RuntimeError
        with pytest.raises(RuntimeError, match=row.theirs or row.words):
            raise theirs
    # As the first call of its kind, once a good call of the same sizes is known, and with the
    # operator called directly.
    for _ in range(2):
        with pytest.raises(RuntimeError, match=row.words):
            OURS[ndim](**arguments)
        OURS[ndim](**good(ndim, dtype))
    direct = {k: [v] if isinstance(v, int) and k != "groups" else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match=row.words):
        getattr(torch.ops.upconv, f"conv_transpose{ndim}d")(**direct)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("kernel", ["cpu_fprop", "aten"])
def test_rows_with_either_kernel_and_gradients(row: Row, kernel: str) -> None:
    arguments = as_bias_dtype(row.change(2, good(2, torch.float32)), torch.float32)
    with ops.forced(kernel):
        OURS[2](**good(2, torch.float32))
        for argument in arguments.values():
            if isinstance(argument, Tensor):
                argument.requires_grad_()
        with pytest.raises(RuntimeError, match=row.words):
            OURS[2](**arguments)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_without_values(row: Row) -> None:
    """Tracing and meta tensors: PyTorch's operator lets most of this pass."""
    if "meta" in row.name:
        return
    arguments = as_bias_dtype(row.change(2, good(2, torch.float32)), torch.float32)
    meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match=row.words):
        OURS[2](**meta)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = {
            k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in arguments.items()
        }
        with pytest.raises(RuntimeError, match=row.words):
            OURS[2](**fake)


@pytest.mark.parametrize("name", ["stride", "padding", "output_padding", "dilation", "groups"])
@pytest.mark.parametrize("value", [1.0, None, True, "1", (1.0, 1), (True, 1), {}, 2.5])
@pytest.mark.parametrize("known", [False, True])
def test_types_of_parameters(name: str, value: Any, known: bool) -> None:
    """PyTorch's own words, also when a call with equal numbers (1 == 1.0 == True) came before."""
    arguments = good(2, torch.float32) | {name: value}
    ops.clear_plans()
    theirs = refusal(by_position(F.conv_transpose2d), arguments)
    assert type(theirs) is TypeError
    if known and not isinstance(value, tuple):
        OURS[2](**good(2, torch.float32))
        OURS[2](**good(2, torch.float32) | ({name: 1} if name in ("stride", "dilation") else {}))
    ours = refusal(OURS[2], arguments)
    assert type(ours) is TypeError
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("name", ["stride", "padding", "output_padding", "dilation"])
@pytest.mark.parametrize("number", [2.0, True, np.float64(1), np.True_], ids=repr)
@pytest.mark.parametrize("spelling", [tuple, list])
@pytest.mark.parametrize("kernel", ["cpu_fprop", "aten"])
def test_equal_numbers_of_other_types_are_no_integers(
    name: str, number: Any, spelling: type, kernel: str
) -> None:
    """(2.0, 2.0) == (2, 2): what a good call left behind must not let a bad one pass."""
    fine = good(2, torch.float32) | {"stride": (3, 3)}
    bad = fine | {name: spelling([number, number])}
    theirs = refusal(by_position(F.conv_transpose2d), bad)
    assert type(theirs) is TypeError
    with ops.forced(kernel):
        for whole in ((int(number),) * 2, (int(number), np.int64(number)), [int(number)] * 2):
            for _ in range(2):
                arguments = fine | {name: whole}
                assert OURS[2](**arguments).shape == F.conv_transpose2d(**arguments).shape
            ours = refusal(OURS[2], bad)
            assert type(ours) is TypeError
            assert str(ours) == str(theirs)


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
@pytest.mark.parametrize("value", [1, [1.0], "x"])
@pytest.mark.parametrize("known", [False, True])
def test_types_of_tensors(name: str, value: Any, known: bool) -> None:
    arguments = good(2, torch.float32) | {name: value}
    theirs = refusal(by_position(F.conv_transpose2d), arguments)
    assert type(theirs) is TypeError
    ops.clear_plans()
    if known:
        OURS[2](**good(2, torch.float32))
    ours = refusal(OURS[2], arguments)
    assert type(ours) is TypeError
    assert str(ours) == str(theirs)


def test_missing_and_unknown_arguments() -> None:
    x, w = good(2, torch.float32).values()
    for arguments in ({"input": x}, {"input": x, "weight": w, "kernel": 3}):
        with pytest.raises(TypeError):
            OURS[2](**arguments)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", ["weight", "bias"])
@pytest.mark.parametrize(
    "other", [*DTYPES, torch.int64, torch.complex64], ids=lambda d: str(d).removeprefix("torch.")
)
@pytest.mark.parametrize("known", [False, True])
def test_mixed_dtypes(
    ndim: int, dtype: torch.dtype, which: str, other: torch.dtype, known: bool
) -> None:
    """PyTorch refuses most and accepts some; whatever it does, we do."""
    if other == dtype:
        other = torch.complex128
    arguments = good(ndim, dtype) | {"bias": torch.ones(6, dtype=dtype)}
    ops.clear_plans()
    if known:
        OURS[ndim](**arguments)
    arguments[which] = torch.ones_like(arguments[which], dtype=other)
    theirs = refusal(THEIRS[ndim], arguments)
    ours = refusal(OURS[ndim], arguments)
    assert type(ours) is type(theirs)
    if theirs is None:
        torch.testing.assert_close(OURS[ndim](**arguments), THEIRS[ndim](**arguments))
    else:
        assert str(ours) == str(theirs)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn],
    ids=str,
)
def test_dtypes_nobody_has(ndim: int, dtype: torch.dtype) -> None:
    x, w = (t.to(dtype) for t in good(ndim, torch.float32).values())
    with pytest.raises(NotImplementedError, match="not implemented for"):
        THEIRS[ndim](x, w)
    with pytest.raises(NotImplementedError, match="not implemented for"):
        OURS[ndim](x, w)


@pytest.mark.parametrize("which", ["input", "weight"])
def test_sparse_tensors_are_refused_as_by_pytorch(which: str) -> None:
    arguments = good(2, torch.float32)
    arguments[which] = arguments[which].to_sparse()
    theirs, ours = refusal(THEIRS[2], arguments), refusal(OURS[2], arguments)
    assert type(ours) is type(theirs) is RuntimeError


def test_onednn_tensors_go_to_pytorch() -> None:
    x, w = good(2, torch.float32).values()
    result = OURS[2](x.to_mkldnn(), w)
    torch.testing.assert_close(result.to_dense(), F.conv_transpose2d(x, w), rtol=1e-4, atol=1e-4)


ACCEPTED: tuple[tuple[str, Callable[[int, dict[str, Any]], dict[str, Any]]], ...] = (
    ("empty batch", put(input=rand(0, 4, 5))),
    ("empty batch, output_padding unchecked", put(input=rand(0, 4, 5), output_padding=1)),
    ("empty batch, dilation 0", put(input=rand(0, 4, 5), dilation=0)),
    ("empty batch, zero spatial", put(input=rand(0, 4, 0))),
    ("unbatched", put(input=rand(4, 5))),
    ("length-1 sequences", put(stride=[2], padding=(1,), output_padding=[1], dilation=(1,))),
    ("lists", put(stride=lambda n, _: [2] * n, padding=lambda n, _: [1] * n)),
    ("output_padding below the dilation", put(output_padding=2, dilation=3)),
    ("meta", put(input=lambda n, x: x.to("meta"), weight=lambda n, w: w.to("meta"))),
    ("input alone on meta", put(input=lambda n, x: x.to("meta"))),
)


@pytest.mark.parametrize(("name", "change"), ACCEPTED, ids=[name for name, _ in ACCEPTED])
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("kernel", ["cpu_fprop", "aten"])
def test_what_pytorch_accepts_is_accepted(name: str, change: Any, ndim: int, kernel: str) -> None:
    arguments = change(ndim, good(ndim, torch.float32))
    expected = THEIRS[ndim](**arguments)
    with ops.forced(kernel):
        for _ in range(2):
            result = OURS[ndim](**arguments)
            assert result.device == expected.device
            assert result.stride() == expected.stride()
            if not result.is_meta:
                torch.testing.assert_close(result, expected)
            else:
                assert result.shape == expected.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_output_of_size_exactly_zero_is_whatever_pytorch_says(
    ndim: int, dtype: torch.dtype
) -> None:
    arguments = good(ndim, dtype) | {"padding": 4}
    arguments["input"] = torch.randn(2, 4, *[6] * ndim).to(dtype)
    theirs, ours = refusal(THEIRS[ndim], arguments), refusal(OURS[ndim], arguments)
    assert type(ours) is type(theirs)
    if theirs is None:
        assert OURS[ndim](**arguments).shape == THEIRS[ndim](**arguments).shape


def test_numpy_integers() -> None:
    import numpy as np

    x, w = good(2, torch.float32).values()
    for stride in (np.int64(2), (np.int32(2), 2), [np.int64(2), np.int64(2)]):
        for _ in range(2):
            result = OURS[2](x, w, stride=stride, groups=np.int64(1))
            torch.testing.assert_close(result, F.conv_transpose2d(x, w, stride=2))
