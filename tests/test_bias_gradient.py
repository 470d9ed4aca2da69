"""The bias's gradient: the kernel's own code, run on a CPU as sm90_on_cpu.py does it, and the
operator. What needs a GPU is in test_cuda_bias.py."""

from __future__ import annotations

import ctypes
import math
import shutil

import numpy as np
import pytest
import sm90_on_cpu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upconv import autograd

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH")

FLOAT32, BFLOAT16 = 0, 1
GUARD = 64


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("bias")
    library = sm90_on_cpu.compiled(folder, ("bias_gradient", "bias_driver"))
    library.upconv_bias_run.restype = ctypes.c_char_p
    return library


def run(
    library: ctypes.CDLL,
    gy: np.ndarray,
    dtype: int,
    channels_last: bool,
    offset: int,
    multiprocessors: int,
) -> tuple[np.ndarray, int]:
    """Sums of [image, channel, pixel], which begins so many elements after a 16-byte boundary."""
    images, channels, pixels = gy.shape
    order = np.moveaxis(gy, 1, 2) if channels_last else gy
    bits = sm90_on_cpu.to_bits(order, dtype)
    memory = sm90_on_cpu.aligned(np.zeros(offset + bits.size, dtype=bits.dtype))
    memory[offset:] = bits.ravel()
    result = sm90_on_cpu.to_bits(np.full(channels + GUARD, np.nan), dtype)
    untouched = result.copy()
    parts = ctypes.c_int()
    failure = library.upconv_bias_run(
        dtype,
        int(channels_last),
        *(ctypes.c_int64(size) for size in (images, channels, pixels)),
        ctypes.c_void_p(memory[offset:].ctypes.data),
        ctypes.c_int64(bits.nbytes),
        ctypes.c_void_p(result.ctypes.data),
        multiprocessors,
        ctypes.byref(parts),
    )
    assert not failure, failure.decode()
    assert (result[channels:].view(np.uint8) == untouched[channels:].view(np.uint8)).all()
    return sm90_on_cpu.from_bits(result[:channels], dtype), parts.value


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 5),
    st.one_of(st.integers(1, 12), st.sampled_from([16, 64, 300])),
    st.one_of(st.integers(1, 90), st.sampled_from([128, 255, 512, 1000, 4099])),
    st.sampled_from([FLOAT32, BFLOAT16]),
    st.booleans(),
    st.integers(0, 7),
)
def test_every_element_is_added_once(
    library: ctypes.CDLL,
    images: int,
    channels: int,
    pixels: int,
    dtype: int,
    channels_last: bool,
    offset: int,
) -> None:
    """Whole numbers, whose sums are exact: what is read twice, or not, shows."""
    pixels = min(pixels, 30_000 // channels)
    gy = np.random.default_rng(0).integers(-3, 4, (images, channels, pixels)).astype(np.float64)
    result, _ = run(library, gy, dtype, channels_last, offset, 2)
    wanted = gy.sum(axis=(0, 2))
    np.testing.assert_allclose(result, wanted, rtol=0 if dtype == FLOAT32 else 2**-8, atol=0)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_blocks_share_a_channel_and_leave_nothing_out(
    library: ctypes.CDLL, dtype: int, channels_last: bool
) -> None:
    gy = np.random.default_rng(0).integers(-3, 4, (3, 4, 40_001)).astype(np.float64)
    result, parts = run(library, gy, dtype, channels_last, 3, 2)
    assert parts > 1
    wanted = gy.sum(axis=(0, 2))
    np.testing.assert_allclose(result, wanted, rtol=0 if dtype == FLOAT32 else 2**-8, atol=0)


def test_numbers_of_different_size_lose_no_more_than_pairs_do(library: ctypes.CDLL) -> None:
    """A sum one after the other would be 1e-4 off."""
    gy = np.abs(np.random.default_rng(0).standard_normal((8, 1, 60_000))).astype(np.float32)
    result, _ = run(library, gy.astype(np.float64), FLOAT32, False, 0, 1)
    exact = gy.astype(np.float64).sum()
    assert abs(result[0] - exact) / exact < 3e-7


@pytest.mark.parametrize("channels_last", [False, True])
def test_sums_that_cancel_are_right_to_the_last_bit(
    library: ctypes.CDLL, channels_last: bool
) -> None:
    half = np.random.default_rng(0).standard_normal((2, 3, 20_000)).astype(np.float32)
    gy = np.concatenate([half, -half[:, :, ::-1]], axis=2).astype(np.float64)
    gy[:, :, 777] += np.float32(1e-3)
    gy = gy.astype(np.float32).astype(np.float64)
    result, parts = run(library, gy, FLOAT32, channels_last, 0, 2)
    assert parts > 1
    exact = [np.float32(math.fsum(channel.ravel())) for channel in gy.swapaxes(0, 1)]
    np.testing.assert_array_equal(result, exact)


def test_nan_and_infinity_stay_in_their_channels(library: ctypes.CDLL) -> None:
    gy = np.ones((2, 3, 77))
    gy[0, 1, 5], gy[1, 2, 76] = np.nan, np.inf
    result, _ = run(library, gy, FLOAT32, False, 1, 1)
    assert result[0] == 154
    assert np.isnan(result[1])
    assert np.isinf(result[2])


@pytest.mark.parametrize("shape", [(2, 5, 7), (5, 7), (2, 5, 3, 4), (2, 5, 2, 3, 4)])
def test_the_operator_sums_over_all_but_the_channels(shape: tuple[int, ...]) -> None:
    ndim = {3: 1, 2: 1, 4: 2, 5: 3}[len(shape)]
    gy = torch.randn(shape)
    wanted = gy.movedim(-ndim - 1, 0).flatten(1).sum(1)
    torch.testing.assert_close(torch.ops.upconv._grad_bias(gy, ndim), wanted)
    torch.testing.assert_close(autograd.bias_gradient(gy, ndim), wanted)


def test_the_gradient_can_be_differentiated_again() -> None:
    gy = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: autograd.bias_gradient(t, 2), gy)
