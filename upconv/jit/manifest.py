"""What ninja is told: one rule for each compiler, one line for each source, and the link.

torch's own `cpp_extension.load` would write this as well, but it has to be imported first: 4 s of
a cold build during which no compiler runs. The compilers get what it would give them, and start in
the order of the sources.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from .recipe import BuildSpec
from .tools import Toolchain

_NEWEST_STANDARD = "c++20"

# As torch compiles its own kernels: 16-bit numbers are converted and computed with by name alone.
_NVCC_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "-Xcompiler=-fPIC",
)


def ninja_file(spec: BuildSpec, toolchain: Toolchain) -> str:
    """The text of build.ninja that makes `<spec.name>.so` in ninja's folder."""
    import torch

    folder = Path(torch.__file__).parent
    headers = [folder / "include", folder / "include" / "torch" / "csrc" / "api" / "include"]
    cuda_home = Path(toolchain.cuda_home) if toolchain.cuda_home and spec.with_cuda else None
    if cuda_home and str(cuda_home) != "/usr":  # gcc must not be told where its own headers are
        headers.append(cuda_home / "include")
    common = [f"-std={cxx_standard(folder)}", *(f"-I{path}" for path in spec.include_paths)]
    cxx_flags = [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in headers),
        *common,
        "-fPIC",
        *toolchain.cxx_flags,
        *spec.cflags,
    ]
    host_compiler = os.environ.get("CC")
    nvcc_flags = [
        *(["-ccbin", host_compiler] if host_compiler else []),
        *common,
        *_NVCC_FLAGS,
        *spec.cuda_cflags,
    ]
    nvcc = f"{cuda_home}/bin/nvcc" if cuda_home else "nvcc"
    link_flags = [*toolchain.cxx_flags, *spec.ldflags, *_libraries(folder / "lib", cuda_home)]
    objects = [f"{source.stem}.o" for source in spec.sources]
    return "\n".join(
        [
            _rule("cxx", [toolchain.cxx or "c++", *cxx_flags], "-c $in -o $out"),
            _rule("nvcc", [nvcc, *nvcc_flags], "-c $in -o $out"),
            _rule("link", [toolchain.cxx or "c++"], "$in -shared", link_flags, "-o $out"),
            *(
                f"build {target}: {'nvcc' if source.suffix == '.cu' else 'cxx'} {_path(source)}"
                for source, target in zip(spec.sources, objects, strict=True)
            ),
            f"build {spec.name}.so: link {' '.join(objects)}",
            "",
        ]
    )


def cxx_standard(torch_folder: Path) -> str:
    """The C++ standard that this torch's headers are written in.

    torch says so nowhere but in the flags that its own builds use, and only a text search finds
    them without importing these.
    """
    try:
        text = (torch_folder / "utils" / "cpp_extension.py").read_text(errors="replace")
    except OSError:
        return _NEWEST_STANDARD
    return max(re.findall(r"['\"]-std=(c\+\+\d+)['\"]", text), default=_NEWEST_STANDARD)


def _libraries(torch_libraries: Path, cuda_home: Path | None) -> list[str]:
    flags = [f"-L{torch_libraries}", "-lc10", "-ltorch_cpu", "-ltorch"]
    if cuda_home:
        folder = cuda_home / "lib64"
        folder = folder if folder.exists() else cuda_home / "lib"
        flags += ["-lc10_cuda", "-ltorch_cuda", f"-L{folder}", "-lcudart"]
    return flags


def _rule(name: str, *command: str | list[str]) -> str:
    """Lists are words for the shell; strings hold ninja's variables and are taken as they are."""
    words = [
        part if isinstance(part, str) else " ".join(map(shlex.quote, part)).replace("$", "$$")
        for part in command
    ]
    return f"rule {name}\n  command = {' '.join(words)}"


def _path(file: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(file))
