"""What ninja is told: the order of the sources, and paths and flags that need quoting."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from jit_helpers import tiny_spec, write_tiny

from upconv import jit, libraries
from upconv.jit import build, manifest, recipe, tools


def test_paths_and_flags_reach_the_compiler_as_they_are(tmp_path: Path) -> None:
    sources = write_tiny(tmp_path / "of $HOME: a 'folder'")
    spec = replace(
        tiny_spec(sources),
        include_paths=(sources,),
        cflags=("-DANSWER=(40 + 2)", "-DTEXT=\"a $1 'b'\""),
    )
    (sources / "tiny.h").write_text("")
    (sources / "tiny.cpp").write_text(
        'extern "C" int upconv_answer() { return ANSWER; }\n'
        'extern "C" const char* upconv_text() { return TEXT; }\n'
    )
    folder = tmp_path / "build"
    folder.mkdir()
    text = manifest.ninja_file(spec, tools.find_toolchain(spec))
    (folder / "build.ninja").write_text(text)
    ninja = tools.find_ninja()
    assert ninja
    subprocess.run([ninja], cwd=folder, check=True, capture_output=True, timeout=120)
    library = ctypes.CDLL(str(folder / "upconv_tiny.so"))
    library.upconv_text.restype = ctypes.c_char_p
    assert library.upconv_answer() == 42
    assert library.upconv_text() == b"a $1 'b'"


def test_the_longest_compilations_start_first() -> None:
    """Ninja starts them in the order of the file: what is long must not be the last to start."""
    spec = jit.spec("cuda", capability=(9, 0))
    text = manifest.ninja_file(spec, tools.find_toolchain(spec))
    started = [
        line.split(".o: ")[0][len("build ") :] for line in text.splitlines() if ".o: " in line
    ]
    assert started == [source.stem for source in spec.sources]

    def places(*endings: str) -> list[int]:
        found = [i for i, name in enumerate(started) if name.endswith(endings)]
        assert found
        return found

    assert started[0] == "cuda_binding"
    assert max(places("_narrow")) < min(places("_rows", "_double"))
    assert max(places("_rows", "_double")) < started.index("direct_float32")
    assert max(places("mma_tf32", "mma_split", "bias_gradient")) < min(places("_launch"))
    assert started.index("direct_float32") < min(places("_launch"))


ALL_HAVE = "shared_memory.cu"
"""What launching takes."""


def sources_of(kind: str) -> set[str]:
    """The names of a library's CUDA sources, on Hopper."""
    sources = jit.spec(kind, capability=(9, 0)).sources
    return {source.name for source in sources if source.suffix == ".cu"}


def test_every_kernel_is_in_a_library() -> None:
    specs = [jit.spec(kind, capability=(9, 0)) for kind in ("cuda", "cuda_wgrad")]
    kernels = [sources_of(kind) for kind in ("cuda", "cuda_wgrad")]
    everything = {file.name for file in (recipe.CSRC / "cuda").glob("*.cu")}
    assert set().union(*map(sources_of, libraries.of_device("cuda"))) == everything
    # Kernels for both gradients share their files, of which each library compiles its own part; the
    # bias's gradient is wanted with the weight's and without it. All launch.
    shared = kernels[0] & kernels[1]
    assert {"bias_gradient.cu", ALL_HAVE} <= shared
    shared.remove(ALL_HAVE)
    assert {name.split("_")[0] for name in shared} == {"bias", "depthwise", "direct", "gather"}
    for number, spec in enumerate(specs):
        assert f"-DUPCONV_WGRAD={number}" in spec.cflags
        assert f"-DUPCONV_WGRAD={number}" in spec.cuda_cflags
    assert specs[0].key() != specs[1].key()


def test_types_share_only_sources_that_choose_among_them() -> None:
    """Each of the others is compiled for one library, all of them but the weight's gradient."""
    held = {kind: sources_of(kind) for kind in libraries.OPERANDS_OF}
    times = Counter(name for names in held.values() for name in names)
    chooses = {name for name in times if "is_here(" in (recipe.CSRC / "cuda" / name).read_text()}
    several = {name for name, number in times.items() if number > 1}
    assert several == chooses | {"gather_launch.cu", ALL_HAVE}
    for kind, operands in libraries.OPERANDS_OF.items():
        named = {name for name in held[kind] if set(operands) & set(Path(name).stem.split("_"))}
        others = {operand for operand in libraries.OPERANDS if operand not in operands}
        assert named
        assert not any(others & set(Path(name).stem.split("_")) for name in held[kind])
        bits = sum(1 << libraries.OPERANDS.index(operand) for operand in operands)
        spec = jit.spec(kind, capability=(9, 0))
        assert f"-DUPCONV_OPERAND_BITS={bits}" in spec.cflags
        assert f"-DUPCONV_OPERAND_BITS={bits}" in spec.cuda_cflags
    assert not any("OPERAND_BITS" in flag for flag in jit.spec("cuda_wgrad").cuda_cflags)


@pytest.mark.parametrize("kind", ["cuda_fp16", "cuda_strict"])
def test_other_gpus_get_types_without_hopper(kind: str) -> None:
    spec = jit.spec(kind, capability=(8, 0))
    names = {source.name for source in spec.sources}
    assert names == {"cuda_types_binding.cpp"} | {
        name for name in sources_of(kind) if not name.startswith("sm90_")
    }
    assert "mma_launch.cu" in names
    assert "-DUPCONV_SM90" not in spec.cflags


def test_the_standard_is_that_of_torchs_own_builds(tmp_path: Path) -> None:
    assert manifest.cxx_standard(tmp_path) == "c++20"
    (tmp_path / "utils").mkdir()
    file = tmp_path / "utils" / "cpp_extension.py"
    file.write_text("# -std=c++26 some day\ncuda_flags.append('-std=c++17')\n")
    assert manifest.cxx_standard(tmp_path) == "c++17"
    file.write_text("cflags = [\"-std=c++17\"] if old else ['-std=c++23', '-fPIC']\n")
    assert manifest.cxx_standard(tmp_path) == "c++23"


@pytest.mark.parametrize("wanted", ["3", "many", ""])
def test_max_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("MAX_JOBS", wanted)
    command = build._request(tiny_spec(tmp_path), tmp_path)["ninja"]
    assert isinstance(command, list)
    jobs = "3" if wanted == "3" else str(2 * len(os.sched_getaffinity(0)))
    assert command[2:] == ["-j", jobs]
