"""The compilers: which will be used, how they are recognised without running them, what is missing.

A compiler is recognised by the path, size and modification time of its executable: any upgrade
changes at least one of them, and looking costs a few stat calls instead of a process. Compiler
caches (ccache) stand in front of the real compiler and say nothing about it, so they are looked
through.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .recipe import BuildSpec, digest

_CACHING_WRAPPERS = ("ccache", "sccache", "distcc", "icecc")

GET_COMPILER = (
    "install one (apt-get install g++, dnf install gcc-c++, or "
    "conda install -c conda-forge cxx-compiler)"
)
GET_NINJA = "install it (pip install ninja)"


@dataclass(frozen=True)
class Toolchain:
    """What there is to build with. `missing` says in words what is not there; empty: all is."""

    cxx: str | None
    cxx_flags: tuple[str, ...]
    """What CXX holds besides the compiler."""
    cuda_home: str | None
    missing: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        files = [self.cxx] if self.cxx else []
        if self.cuda_home:
            files += [f"{self.cuda_home}/bin/nvcc", f"{self.cuda_home}/version.json"]
        return digest("\n".join([*map(_identity, files), *self.cxx_flags]))

    def environment(self) -> dict[str, str]:
        """The environment for the build."""
        # The build loads the library once, to see that it can be; that needs no GPU.
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def find_toolchain(spec: BuildSpec) -> Toolchain:
    """Look for the compilers that the spec needs; runs nothing."""
    missing = []
    (cxx, *flags), cuda_home = _find_cxx(), None
    if cxx is None:
        wanted = os.environ.get("CXX")
        place = _why_not(wanted) if wanted else "none of c++, g++, clang++ is on PATH"
        missing.append(f"no C++ compiler was found ({place}): {GET_COMPILER}")
    if spec.with_cuda:
        import torch

        cuda_home = _find_cuda_home()
        if torch.version.cuda is None:
            missing.append(
                f"this PyTorch ({torch.__version__}) was built without CUDA: "
                "install a CUDA build of PyTorch"
            )
        elif cuda_home is None:
            missing.append(
                "nvcc, the CUDA compiler, was not found (looked in CUDA_HOME, PATH and "
                f"/usr/local/cuda): install the CUDA toolkit {torch.version.cuda} and set CUDA_HOME"
            )
    return Toolchain(cxx, tuple(filter(None, flags)), cuda_home, tuple(missing))


def what_is_missing(toolchain: Toolchain) -> str:
    """Everything that stands in the way of a build, in one sentence; empty when nothing does."""
    if getattr(sys, "frozen", False):
        return (
            f"this is a frozen application (sys.frozen), and {sys.executable} would start it again "
            "instead of a build: run `upconv build` with an ordinary Python that has the same "
            "PyTorch, and set UPCONV_CACHE_DIR to its cache folder"
        )
    missing = list(toolchain.missing)
    if find_ninja() is None:
        missing.append(f"ninja was not found: {GET_NINJA}")
    return "; ".join(missing)


@functools.lru_cache(maxsize=8)
def compiler_version(cxx: str) -> str:
    """First line of `--version`. Runs the compiler: for reports, never on the way to a kernel."""
    try:
        run = subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as problem:
        return f"unknown ({problem})"
    return (run.stdout or run.stderr).partition("\n")[0].strip()


def find_ninja() -> str | None:
    """ninja on PATH, else the one of the Python package, wherever that keeps it."""
    found = shutil.which("ninja")
    if found is None:
        try:
            from ninja import BIN_DIR  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            return None
        found = shutil.which("ninja", path=str(BIN_DIR))
    return found


def _find_cxx() -> list[str | None]:
    """The compiler, or None, and its flags."""
    wanted = os.environ.get("CXX")
    if wanted:
        try:
            words = shlex.split(wanted)
        except ValueError:  # a quote that is never closed
            return [None]
        # "ccache g++ -m64": a build happens once, so that a cache in front of it only costs.
        words = [word for word in words if os.path.basename(word) not in _CACHING_WRAPPERS]
        return [shutil.which(words[0]), *words[1:]] if words else [None]
    return [next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)]


def _why_not(wanted: str) -> str:
    """Why CXX names no compiler."""
    try:
        shlex.split(wanted)
    except ValueError as error:
        return f"CXX={wanted} cannot be read: {error}"
    return f"CXX={wanted} is not there"


def _find_cuda_home() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.append(str(Path(os.path.realpath(nvcc)).parent.parent))
    homes.append("/usr/local/cuda")
    # An nvcc without headers beside it is a wrapper script, not the toolkit.
    for home in filter(None, homes):
        if shutil.which(f"{home}/bin/nvcc") and Path(home, "include", "cuda_runtime.h").exists():
            return home
    return None


def _identity(file: str) -> str:
    real = os.path.realpath(file)
    if os.path.basename(real) in _CACHING_WRAPPERS:
        real = _behind_wrapper(os.path.basename(file)) or real
    try:
        status = os.stat(real)
    except OSError:
        return f"{real} absent"
    # Whole seconds: container images and archives do not keep the rest.
    return f"{real} {status.st_size} {int(status.st_mtime)}"


def _behind_wrapper(name: str) -> str | None:
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        found = shutil.which(name, path=folder)
        if found and os.path.basename(os.path.realpath(found)) not in _CACHING_WRAPPERS:
            return os.path.realpath(found)
    return None
