"""The Hopper kernel's own C++ on a CPU: compiled with g++ against a make-believe device.

csrc/cuda is compiled as it is, but for ptx.cuh and wgmma.cuh, whose instructions are functions in
tests/cuda_on_cpu, and for the launches, whose syntax C++ does not have. So loaders, feeder,
consumers, epilogue, packing and the description of the TMA boxes run on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parent
CUDA = TESTS.parent / "upconv" / "csrc" / "cuda"
DEVICE = TESTS / "cuda_on_cpu"
HEADERS = ("cuda.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_runtime.h", "cuda_runtime_api.h")
LAUNCH = re.compile(r"([\w<>]+)<<<(\w+), (\w+), \w+, stream>>>\(")
OF_A_BLOCK = re.compile(r"^  __shared__ ", re.M)
"""Variables of all threads of a block: one is run after the other."""
PARTS = ("tf32", "bf16", "fp16", "split")
SOURCES = (
    *(file.stem for part in PARTS for file in sorted(CUDA.glob(f"sm90_{part}*.cu"))),
    "sm90_launch",
    "sm90_driver",
)
WIDE, HALF = (0, 3), 2
"""Operand types of 32 bits, and the one that is FP16."""


def compiled(folder: Path, sources: tuple[str, ...] = SOURCES) -> ctypes.CDLL:
    """The kernel as a library; takes a minute."""
    for file in CUDA.iterdir():
        name = f"{file.stem}.cpp" if file.suffix == ".cu" else file.name
        text = OF_A_BLOCK.sub("  static ", file.read_text())
        (folder / name).write_text(LAUNCH.sub(r"launch(\1, \2, \3, ", text))
    for file in DEVICE.iterdir():
        (folder / file.name).write_text(file.read_text())
    for name in (*HEADERS, "wgmma.cuh", "wgmma_registers.cuh"):
        (folder / name).write_text('#pragma once\n#include "ptx.cuh"\n')

    def compile_one(source: str) -> Path:
        target = folder / f"{source}.o"
        command = [
            "g++",
            "-std=c++17",
            "-O1",
            "-w",
            "-fPIC",
            "-I.",
            "-c",
            f"{source}.cpp",
            "-o",
            target,
        ]
        subprocess.run(command, cwd=folder, check=True, timeout=600)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, (*sources, "device")))
    library = folder / "kernel.so"
    # The shared memory of kernels in a namespace of their own is the same memory.
    same = [
        f"-Wl,--defsym=_ZN6upconv{len(name)}{name}6memoryE=_ZN6upconv6memoryE"
        for name in ("wgrad", "patch", "phases", "wgrad_phases", "walk")
    ]
    subprocess.run(["g++", "-shared", *same, "-o", library, *objects], check=True, timeout=100)
    return ctypes.CDLL(str(library))


def to_bits(values: np.ndarray, operand: int) -> np.ndarray:
    """float32, or 16 bits: FP16, or the upper half of float32 for bfloat16."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    if operand == HALF:
        return single.astype(np.float16).view(np.uint16)
    return single if operand in WIDE else (single.view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray, operand: int) -> np.ndarray:
    if bits.dtype == np.float32:
        return bits
    if operand == HALF:
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def run(
    library: ctypes.CDLL,
    record: tuple[int, ...],
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    out_shape: tuple[int, ...],
    multiprocessors: int,
    seed: int = 1,
    channels_last: bool = False,
) -> np.ndarray:
    """The output; what no store reached is NaN."""
    operand = record[0]
    if channels_last:
        x = np.moveaxis(x, 1, -1)
        out_shape = (out_shape[0], *out_shape[2:], out_shape[1])
    tensors = [
        None if each is None else aligned(to_bits(each, operand)) for each in (x, weight, bias)
    ]
    y = aligned(
        np.full(
            out_shape,
            0xFFFFFFFF if operand in WIDE else 0xFFFF,
            dtype=np.uint32 if operand in WIDE else np.uint16,
        )
    )
    arguments: list[object] = []
    for tensor in (*tensors, y):
        none = tensor is None
        arguments.append(ctypes.c_void_p(None if none else tensor.ctypes.data))
        arguments.append(ctypes.c_int64(0 if none else tensor.nbytes))
    integers = (ctypes.c_int64 * len(record))(*record)
    library.upconv_run.restype = ctypes.c_char_p
    failure = library.upconv_run(
        integers, ctypes.c_int64(len(record)), *arguments, multiprocessors, ctypes.c_uint64(seed)
    )
    assert not failure, failure.decode()
    result = from_bits(y.view(np.float32) if operand in WIDE else y, operand)
    return np.moveaxis(result, -1, 1) if channels_last else result


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins on 16 bytes, as the binding gives it to the kernel."""
    memory = np.empty(array.nbytes + 16, dtype=np.uint8)
    start = -memory.ctypes.data % 16
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
