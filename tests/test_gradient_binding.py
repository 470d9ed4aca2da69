"""The compiled side without a GPU: gradients on a device made for tests; CUDA's, compiled only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from upconv import jit, libraries

TESTS = Path(__file__).resolve().parent
COMPILER = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("probe", ["gradient_probe", "kernel_table_probe"])
def test_keys_plans_checks_and_fallback(tmp_path: Path, probe: str) -> None:
    library = tmp_path / f"{probe}.so"
    folder = Path(torch.__file__).parent / "lib"
    command = [str(COMPILER), "-std=c++20", "-O0", "-fPIC", "-shared"]
    command += [f"-I{TESTS.parent / 'upconv' / 'csrc'}", f"-I{TESTS / 'host_cuda'}"]
    command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [str(TESTS / f"{probe}.cpp"), "-o", str(library)]
    command += [f"-L{folder}", "-ltorch_cpu", "-lc10"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [sys.executable, str(TESTS / f"{probe}.py"), str(library)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "fine"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("kind", libraries.of_device("cuda"))
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_the_binding_of_the_gpu_kernels_compiles(
    tmp_path: Path, kind: str, capability: tuple[int, int]
) -> None:
    """Against torch's headers, of which one is made by a build with CUDA and missing elsewhere."""
    made = tmp_path / "c10" / "cuda" / "impl"
    made.mkdir(parents=True)
    (made / "cuda_cmake_macros.h").write_text("#pragma once\n")
    source = TESTS.parent / "upconv" / "csrc"
    folders = [*cpp_extension.include_paths(), str(tmp_path), sysconfig.get_path("include")]
    # nvcc knows where CUDA's headers are; the host's compiler is what it calls.
    command = ["nvcc", "-std=c++20", "-Xcompiler", "-fsyntax-only", f"-I{source}"]
    spec = jit.spec(kind, capability)
    command += [flag for flag in spec.cflags if flag.startswith("-D")]
    command += [f"-isystem={folder}" for folder in folders]
    (binding,) = (file for file in spec.sources if file.suffix == ".cpp")
    command += ["-c", str(binding), "-o", str(tmp_path / "none.o")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("cuda_binding.cpp", r'library\.impl\("(\w+)"'),
        ("cuda_kernels.h", r"(?<!inline CudaKernel )\b(\w+)_kernel\(\)"),
    ],
)
def test_each_library_has_what_it_serves(file: str, pattern: str) -> None:
    """An operator in the wrong one would find no kernel, and leave its calls to PyTorch."""
    text = (TESTS.parent / "upconv" / "csrc" / "binding" / file).read_text()
    before, wgrad, others = re.split(r"#if UPCONV_WGRAD\n|#else\n", text)
    assert not re.findall(pattern, before)
    for part, belongs in ((wgrad, True), (others, False)):
        names = re.findall(pattern, part)
        assert names
        for name in names:
            assert bool(re.search("wgrad|grad_weight", name)) is belongs, name


def test_no_weight_gradient_is_among_the_kernels_whose_types_are_apart() -> None:
    text = (TESTS.parent / "upconv" / "csrc" / "binding" / "cuda_tensor_cores.h").read_text()
    listed = re.findall(
        r"(\w+)_kernel\(\)", text[text.index("KernelTable tensor_core_kernels()") :]
    )
    assert len(listed) == len(libraries.BY_OPERAND)
    assert not any("wgrad" in name for name in listed)
