"""What is built: the sources and flags of each library, and the key that names a build.

The key of a build has two halves, so that a warm start needs no compiler:

- `BuildSpec.key()`: the content of every source and header, the flags, upconv's version, torch
  (version, commit, CUDA version, C++ ABI), the Python ABI, the C library and the architecture. All
  of it is read from this process and from files, in about a millisecond.
- `Toolchain.fingerprint`: path, size and modification time of the compilers (see `tools.py`).
  Where nothing can be built, a build with any fingerprint is accepted.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ..libraries import KINDS, OPERANDS_OF, operand_bits
from ..version import __version__

CSRC = Path(__file__).resolve().parent.parent / "csrc"

SOURCES = {
    "cpu": ("binding/cpu_binding.cpp", "cpu/*.cpp"),
    "cuda": ("binding/cuda_binding.cpp", "cuda/*.cu"),
    "cuda_wgrad": (
        "binding/cuda_binding.cpp",
        "cuda/sm90_wgrad_*.cu",
        "cuda/direct_grad_*.cu",
        "cuda/depthwise_*.cu",
        "cuda/gather_wgrad_*.cu",
        "cuda/gather_launch.cu",
        "cuda/bias_gradient.cu",
        "cuda/shared_memory.cu",
    ),
    "cuda_fp16": (
        "binding/cuda_types_binding.cpp",
        "cuda/sm90_fp16*.cu",
        "cuda/mma_fp16.cu",
        "cuda/overlap_fp16.cu",
        "cuda/overlap_launch.cu",
        "cuda/gather_igrad_fp16.cu",
        "cuda/sm90_launch.cu",
        "cuda/sm90_patch.cu",
        "cuda/sm90_phases.cu",
        "cuda/sm90_walk.cu",
        "cuda/mma_launch.cu",
        "cuda/gather_igrad_launch.cu",
        "cuda/gather_launch.cu",
        "cuda/shared_memory.cu",
    ),
    "cuda_strict": (
        "binding/cuda_types_binding.cpp",
        "cuda/sm90_split*.cu",
        "cuda/mma_split.cu",
        "cuda/overlap_split.cu",
        "cuda/overlap_launch.cu",
        "cuda/sm90_launch.cu",
        "cuda/sm90_patch.cu",
        "cuda/mma_launch.cu",
        "cuda/shared_memory.cu",
    ),
}
"""What is compiled, as patterns below csrc. File stems must differ: they name the objects."""

_FOREIGN = {
    "cpu": ("cuda/", "binding/cuda_", "export/"),
    **{kind: ("cpu/", "binding/cpu_", "export/") for kind in KINDS if kind != "cpu"},
}
"""What belongs to other libraries or to exported files only, and so does not enter the key."""

_ELSEWHERE = {
    "cuda": (
        "cuda/sm90_wgrad_*",
        "cuda/gather_wgrad_*",
        "cuda/direct_grad_*float16.cu",
        "cuda/*_fp16*",
        "cuda/*_split*",
    ),
}
"""What a library's own patterns find and another library has."""

_HOPPER_SOURCES = "cuda/sm90_"
"""Sources with WGMMA in them, which compile for compute capability 9.0a alone: a machine with any
other GPU gets the library without them, and a binding that leaves their plans to PyTorch."""

_LONGEST_FIRST = (
    "binding/*",  # a single thread, 10 s
    "cuda/sm90_wgrad_tf32.cu",  # 32 s, of which most in several threads
    "cuda/sm90_*_narrow.cu",  # 14 to 20 s
    "cuda/sm90_phases.cu",  # 13 s for two types, in several threads
    "cuda/sm90_walk.cu",  # 13 s for two types, in several threads
    "cuda/sm90_*patch.cu",  # 13 s for two types and 7 s, in several threads
    "cuda/sm90_wgrad_*16.cu",  # 18 s
    "cuda/sm90_wgrad_phases.cu",  # 14 s, in several threads
    "cuda/sm90_*[!h].cu",  # 13 to 17 s
    "cuda/direct_float32.cu",  # 11 s
    "cuda/direct_*float16.cu",  # 6 s
    "cuda/mma_*[0-9t].cu",  # 5 s
    "cuda/*[!h].cu",  # 3 s
    "cuda/*_launch.cu",  # 1 s
)
"""The order in which the compilers start, so that no long one is the last; in CPU seconds."""

_SUFFIXES = (".h", ".hpp", ".inc", ".cuh", ".cpp", ".cu")

# torch's own flags carry no -O at all. The library is used through its registrations alone, so
# nothing but those need be visible.
CFLAGS = ("-O3", "-fopenmp", "-fvisibility=hidden")
# Of torch's libraries, those that are used.
LDFLAGS = ("-fopenmp", "-Wl,--as-needed")
# The bindings of the GPU hold no loop worth unrolling: 9 s instead of 11.
CUDA_HOST_CFLAGS = ("-O2", "-fopenmp", "-fvisibility=hidden")
CUDA_CFLAGS = (
    "-O3",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fvisibility=hidden",
    "--split-compile=0",  # the kernels of a file side by side: 19 s instead of 50 on 16 cores
)


@dataclass(frozen=True)
class BuildSpec:
    """One library: everything that decides what its machine code is."""

    kind: str
    sources: tuple[Path, ...]
    inputs: tuple[Path, ...]
    """Every file that the build may read, headers included."""
    cflags: tuple[str, ...] = CFLAGS
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = LDFLAGS
    include_paths: tuple[Path, ...] = ()
    arch: str = ""

    @property
    def name(self) -> str:
        return f"upconv_{self.kind}"

    @property
    def with_cuda(self) -> bool:
        return any(source.suffix == ".cu" for source in self.sources)

    def parts(self) -> dict[str, str]:
        """What the key is made of. Reads the inputs anew each time: they may have been edited."""
        import torch

        flags = (self.cflags, self.cuda_cflags, self.ldflags)
        return {
            "upconv": __version__,
            "kind": self.kind,
            "inputs": _digest_files(self.inputs),
            "flags": json.dumps(flags),
            "torch": str(torch.__version__),
            "torch_commit": str(torch.version.git_version),
            "cuda": str(torch.version.cuda),
            "cxx11_abi": str(torch.compiled_with_cxx11_abi()),
            "python": importlib.machinery.EXTENSION_SUFFIXES[0],
            "libc": _libc(),
            "arch": f"{sys.platform}-{platform.machine()}-{self.arch}",
        }

    def key(self) -> str:
        return digest(json.dumps(self.parts(), sort_keys=True))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _libc() -> str:
    # A library linked against a newer glibc does not load on an older one, and homes are shared.
    try:
        return str(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError):
        return ""


def _digest_files(files: Sequence[Path]) -> str:
    whole = hashlib.sha256()
    # Names relative to what they share: the same package installed elsewhere has the same key.
    root = os.path.commonpath([file.parent for file in files]) if files else ""
    for file in files:
        content = file.read_bytes()
        whole.update(f"{os.path.relpath(file, root)}\0{len(content)}\0".encode())
        whole.update(content)
    return whole.hexdigest()


def gencode(capability: tuple[int, int]) -> str:
    """nvcc's flag."""
    # 9.0a, not 9.0: WGMMA exists only in the architecture-specific variant, which torch's own
    # choice of flags never selects.
    number = f"{capability[0]}{capability[1]}" + ("a" if capability[0] == 9 else "")
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def _capabilities() -> list[tuple[int, int]]:
    """Of every visible GPU; Hopper where there is none, so that one can build ahead of time."""
    import torch

    if not torch.cuda.is_available():
        return [(9, 0)]
    return sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})


def _below_csrc(file: Path) -> str:
    return file.relative_to(CSRC).as_posix()


def _rank(source: Path) -> int:
    name = _below_csrc(source)
    return next((i for i, pattern in enumerate(_LONGEST_FIRST) if fnmatch(name, pattern)), 99)


def _parts(kind: str) -> list[str]:
    """Which part of sources that several of the GPU's libraries share a library compiles."""
    operands = [f"-DUPCONV_OPERAND_BITS={operand_bits(kind)}"] if kind in OPERANDS_OF else []
    if kind in ("cuda", "cuda_wgrad"):
        return [*operands, f"-DUPCONV_WGRAD={int(kind == 'cuda_wgrad')}"]
    return [*operands, f"-DUPCONV_TABLE=_{kind}_kernels"]


def make_spec(kind: str, capability: tuple[int, int] | None = None) -> BuildSpec:
    """The build of a library from this installation's csrc."""
    if kind not in KINDS:
        raise ValueError(f"there is no library {kind!r}; choose one of {', '.join(KINDS)}")
    found = [file for pattern in SOURCES[kind] for file in sorted(CSRC.glob(pattern))]
    left_out = _ELSEWHERE.get(kind, ())
    sources = [f for f in found if not any(fnmatch(_below_csrc(f), name) for name in left_out)]
    sources.sort(key=_rank)
    inputs = [
        file
        for file in sorted(CSRC.rglob("*"))
        if file.suffix in _SUFFIXES and not _below_csrc(file).startswith(_FOREIGN[kind])
    ]
    gencodes: list[str] = []
    cflags: tuple[str, ...] = CFLAGS
    cuda_cflags: tuple[str, ...] = ()
    if kind != "cpu":
        parts = _parts(kind)
        cflags = (*CUDA_HOST_CFLAGS, *parts)
        capabilities = [capability] if capability else _capabilities()
        gencodes = [gencode(c) for c in capabilities]
        cuda_cflags = (*CUDA_CFLAGS, *parts, *gencodes)
        if all(c == (9, 0) for c in capabilities):
            cflags = (*cflags, "-DUPCONV_SM90")
        else:
            sources = [f for f in sources if not _below_csrc(f).startswith(_HOPPER_SOURCES)]
    return BuildSpec(
        kind=kind,
        sources=tuple(sources),
        inputs=tuple(inputs),
        cflags=cflags,
        cuda_cflags=cuda_cflags,
        include_paths=(CSRC,),
        arch=" ".join(gencodes),
    )
