"""Builds and the cache key: what makes a new build, what does not, what a failure looks like."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jit_helpers import (
    compilations,
    entries,
    finish,
    leftovers,
    start,
    tiny_spec,
    warnings_of,
    write_compiler,
)

import upconv
from upconv import env, jit, libraries, plans
from upconv.jit import build, loader, recipe, store, tools

pytest_plugins = ["jit_fixtures"]


@pytest.fixture
def tiny_cpu(monkeypatch, tiny_sources):
    """Makes `load("cpu")` mean the tiny library."""
    spec = replace(tiny_spec(tiny_sources), kind="cpu")
    monkeypatch.setattr(loader, "make_spec", lambda kind, capability: spec)
    return spec


def test_build_once_then_load(build_cache, tiny_sources, capfd):
    before, folder = dict(os.environ), os.getcwd()
    first = loader.obtain(tiny_spec(tiny_sources))
    assert first.ok, first.reason
    assert first.built
    assert ctypes.CDLL(str(first.path)).upconv_answer() == 42
    # One entry, nothing half-made, and a manifest that says what the entry is.
    assert leftovers(build_cache) == []
    assert [first.path.parent] == entries(build_cache)
    manifest = json.loads((first.path.parent / "manifest.json").read_text())
    assert manifest["size"] == first.path.stat().st_size
    assert manifest["key"]["torch"] == torch.__version__
    second = loader.obtain(tiny_spec(tiny_sources))
    assert second == replace(first, built=False)
    # The build left no trace in this process.
    assert dict(os.environ) == before
    assert os.getcwd() == folder
    assert capfd.readouterr() == ("", "")


def test_everything_that_matters_is_in_the_key(tiny_sources, monkeypatch):
    spec = tiny_spec(tiny_sources)
    keys = {spec.key()}

    def is_new():
        keys.add(spec.key())
        return len(keys)

    (tiny_sources / "tiny.h").write_text("#define ANSWER 43\n")
    assert is_new() == 2
    (tiny_sources / "tiny.cpp").write_text("// another comment\n")
    assert is_new() == 3
    for changed in ("cflags", "cuda_cflags", "ldflags"):
        keys.add(replace(spec, **{changed: ("-g",)}).key())
    keys.add(replace(spec, arch="sm_90a").key())
    keys.add(replace(spec, kind="other").key())
    assert len(keys) == 8
    for module, name in (
        (torch, "__version__"),
        (torch.version, "git_version"),
        (torch.version, "cuda"),
        (recipe, "__version__"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, "another")
            is_new()
    assert len(keys) == 12


def test_key_does_not_depend_on_the_place(tiny_sources, tmp_path):
    elsewhere = shutil.copytree(tiny_sources, tmp_path / "elsewhere")
    assert tiny_spec(tiny_sources).key() == tiny_spec(elsewhere).key()


def test_changed_torch_builds_anew_and_keeps_the_old(build_cache, built_tiny, monkeypatch):
    shutil.copytree(built_tiny.folder, build_cache)
    spec = tiny_spec(built_tiny.sources)
    old = loader.obtain(spec)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        new = loader.obtain(spec)
    assert not old.built
    assert new.built
    assert len(entries(build_cache)) == 2
    assert loader.obtain(spec).path == old.path


def test_compiler_upgraded_in_place_is_another_compiler(tiny_sources, tmp_path, monkeypatch):
    compiler = write_compiler(tmp_path / "bin")
    monkeypatch.setenv("CXX", str(compiler))
    before = tools.find_toolchain(tiny_spec(tiny_sources)).fingerprint
    assert before == tools.find_toolchain(tiny_spec(tiny_sources)).fingerprint
    compiler.write_text(compiler.read_text() + "# 2.0\n")
    assert tools.find_toolchain(tiny_spec(tiny_sources)).fingerprint != before


def test_compiler_caches_are_looked_through(tmp_path, monkeypatch, tiny_sources):
    plain = tools.find_toolchain(tiny_spec(tiny_sources)).fingerprint
    masked = tmp_path / "masked"
    masked.mkdir()
    (masked / "ccache").write_text("#!/bin/sh\n")
    (masked / "ccache").chmod(0o755)
    (masked / "c++").symlink_to("ccache")
    monkeypatch.setenv("PATH", f"{masked}:{os.environ['PATH']}")
    assert tools.find_toolchain(tiny_spec(tiny_sources)).fingerprint == plain
    monkeypatch.setenv("CXX", "ccache /usr/bin/c++")
    assert tools.find_toolchain(tiny_spec(tiny_sources)).cxx == "/usr/bin/c++"


def test_flags_in_cxx(tiny_sources, monkeypatch):
    spec = tiny_spec(tiny_sources)
    plain = tools.find_toolchain(spec)
    monkeypatch.setenv("CXX", "c++ -m64 -DX='a b'")
    found = tools.find_toolchain(spec)
    assert (found.cxx, found.cxx_flags) == (shutil.which("c++"), ("-m64", "-DX=a b"))
    assert found.fingerprint != plain.fingerprint


def test_cuda_home(tmp_path, monkeypatch):
    """An nvcc on PATH that has no toolkit around it is a wrapper script and names no home."""
    toolkit, wrapper = tmp_path / "toolkit", tmp_path / "wrapper"
    for home in (toolkit, wrapper):
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "nvcc").write_text("#!/bin/sh\n")
        (home / "bin" / "nvcc").chmod(0o755)
    (toolkit / "include").mkdir()
    (toolkit / "include" / "cuda_runtime.h").touch()
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{wrapper}/bin")
    assert tools._find_cuda_home() != str(wrapper)
    monkeypatch.setenv("PATH", f"{toolkit}/bin")
    assert tools._find_cuda_home() == str(toolkit)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    assert tools._find_cuda_home() == str(toolkit)


def test_warm_start_needs_no_tools(build_cache, built_tiny):
    shutil.copytree(built_tiny.folder, build_cache)
    answer = finish(start(built_tiny.sources, build_cache, PATH=""))
    assert answer["ok"], answer["reason"]
    assert not answer["built"]
    assert not answer["build_machinery"]


def test_warm_start_takes_another_compilers_build_only_without_a_compiler(
    build_cache, built_tiny, tmp_path, monkeypatch
):
    shutil.copytree(built_tiny.folder, build_cache)
    spec = tiny_spec(built_tiny.sources)
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "/nowhere/c++")
        result = loader.obtain(spec)
        assert result.ok
        assert not result.built
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "bin")))
    assert loader.obtain(spec).built


def test_no_compiler(build_cache, tiny_cpu, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    results = []
    texts = warnings_of(lambda: results.extend([jit.load("cpu"), jit.load("cpu")]))
    assert not results[0].ok
    assert results[0] is results[1]
    assert len(texts) == 1
    assert "no C++ compiler was found" in texts[0]
    assert "apt-get install g++" in texts[0]
    assert "PyTorch's kernels are used instead" in texts[0]
    monkeypatch.setattr(loader, "_results", {})
    monkeypatch.setenv("CXX", "/nowhere/clang++")
    assert "CXX=/nowhere/clang++" in loader.obtain(tiny_cpu).reason


def test_the_warning_points_at_the_users_line(build_cache, tiny_cpu, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(libraries, "compiled", lambda kind: False)
    monkeypatch.setattr(libraries, "_not_served", set())
    layer, x = upconv.ConvTranspose2d(8, 8, 3), torch.randn(1, 8, 33, 31)
    plans.clear()
    with torch.no_grad(), pytest.warns(loader.UpconvWarning) as caught:
        layer(x)
    (warning,) = caught
    assert warning.filename == __file__


def test_no_ninja(build_cache, tiny_cpu, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setenv("PATH", str(write_compiler(tmp_path / "bin").parent))
    (text,) = warnings_of(lambda: jit.load("cpu"))
    assert "ninja was not found" in text
    assert "pip install ninja" in text
    assert "compiler" not in text


def test_ninja_of_the_package_is_enough(build_cache, tiny_sources, tmp_path, monkeypatch):
    """torch looks on PATH only; a virtual environment that is not activated is not there."""
    pytest.importorskip("ninja", reason="the ninja package is not installed")
    bin = write_compiler(tmp_path / "bin").parent
    # The linker driver looks up `as` and `ld` on PATH.
    for name in ("as", "ld", "sh"):
        (bin / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(bin))
    assert shutil.which("ninja") is None
    result = loader.obtain(tiny_spec(tiny_sources))
    assert result.built, result.reason


def test_compile_error(build_cache, tiny_cpu, tiny_sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "bin")))
    (tiny_sources / "tiny.h").write_text("#define ANSWER forty_two\n")
    results = []
    (text,) = warnings_of(lambda: results.extend([jit.load("cpu"), jit.load("cpu")]))
    assert not results[0].ok
    # The reason is the compiler's own error, and the rest of what it said is kept.
    assert re.search(r"tiny\.h:1:16: error: .forty_two. was not declared", text)
    (log,) = (build_cache / "upconv-logs").iterdir()
    assert str(log) in text
    assert "ninja" in log.read_text()
    assert len(compilations(tmp_path / "bin")) == 1
    assert leftovers(build_cache) == []


def test_the_next_process_tries_again(build_cache, tiny_sources, tmp_path, monkeypatch):
    """And a success clears the log of the failure away."""
    switch = tmp_path / "broken"
    switch.touch()
    compiler = write_compiler(tmp_path / "bin", before=f"test ! -e {switch} || exit 1")
    monkeypatch.setenv("CXX", str(compiler))
    assert not loader.obtain(tiny_spec(tiny_sources)).ok
    assert len(list((build_cache / "upconv-logs").iterdir())) == 1
    switch.unlink()
    assert loader.obtain(tiny_spec(tiny_sources)).built
    assert list((build_cache / "upconv-logs").iterdir()) == []


def test_undefined_symbol_is_found_by_the_build(build_cache, tiny_sources):
    """A shared library links with symbols missing; it must not be installed and then fail."""
    (tiny_sources / "tiny.cpp").write_text(
        'int nowhere();\nextern "C" int upconv_answer() { return nowhere(); }\n'
    )
    spec = replace(tiny_spec(tiny_sources), ldflags=("-Wl,-z,now",))
    result = loader.obtain(spec)
    assert not result.ok
    assert "undefined symbol" in result.reason
    assert entries(build_cache) == []


def test_library_that_crashes_when_loaded(build_cache, tiny_sources):
    """It takes down the build's process, not ours. What was said before does not hide that."""
    with (tiny_sources / "tiny.cpp").open("a") as file:
        file.write("#include <csignal>\n#include <cstdio>\n")
        file.write('static int said = std::fputs("warning: odd\\n", stderr);\n')
        file.write("static int crash = raise(SIGSEGV);\n")
    result = loader.obtain(tiny_spec(tiny_sources))
    assert not result.ok
    assert "signal 11" in result.reason
    assert entries(build_cache) == []


def test_sources_edited_during_the_build(build_cache, tiny_sources, tmp_path, monkeypatch):
    """What was compiled from one text must not be kept under the key of another."""
    edit = f"test -e {tmp_path}/edited || echo '#define ANSWER 7' > '{tiny_sources}/tiny.h'"
    compiler = write_compiler(tmp_path / "bin", before=f"{edit}; touch {tmp_path}/edited")
    monkeypatch.setenv("CXX", str(compiler))
    result = loader.obtain(tiny_spec(tiny_sources))
    assert result.built
    assert len(compilations(tmp_path / "bin")) == 2
    assert len(entries(build_cache)) == 1
    assert ctypes.CDLL(str(result.path)).upconv_answer() == 7
    assert not loader.obtain(tiny_spec(tiny_sources)).built


def test_umask_does_not_matter(build_cache, tiny_sources):
    """With umask 0 a linker writes files that anybody may change; those would not be loaded."""
    old = os.umask(0)
    try:
        assert loader.obtain(tiny_spec(tiny_sources)).built
    finally:
        os.umask(old)
    again = loader.obtain(tiny_spec(tiny_sources))
    assert again.ok
    assert not again.built


def test_backend_aten_never_builds(build_cache, tiny_cpu, monkeypatch):
    monkeypatch.setenv("UPCONV_BACKEND", "aten")
    env.reload()
    assert warnings_of(lambda: jit.load("cpu")) == []
    assert not jit.load("cpu").ok
    assert "UPCONV_BACKEND=aten" in jit.load("cpu").reason
    assert not build_cache.exists()


def test_backend_native_makes_a_failure_an_error(build_cache, tiny_cpu, monkeypatch):
    monkeypatch.setenv("UPCONV_BACKEND", "native")
    monkeypatch.setenv("PATH", "/nowhere")
    env.reload()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no C\\+\\+ compiler was found"):
            jit.load("cpu")


def test_bad_setting_is_an_error(build_cache, tiny_cpu, monkeypatch):
    monkeypatch.setenv("UPCONV_BACKEND", "fast")
    monkeypatch.setattr(env, "_settings", None)
    with pytest.raises(ValueError, match="auto, native, aten"):
        jit.load("cpu")


def test_unknown_kind():
    for call in (jit.load, jit.spec):
        with pytest.raises(ValueError, match=r"'gpu'.*cpu, cuda"):
            call("gpu")


def test_unforeseen_trouble_is_a_reason(build_cache, monkeypatch):
    def broken(kind, capability):
        raise OSError("the disk is on fire")

    monkeypatch.setattr(loader, "make_spec", broken)
    (text,) = warnings_of(lambda: jit.load("cpu"))
    assert "the disk is on fire" in text


def test_cuda_spec():
    spec = jit.spec("cuda", capability=(9, 0))
    assert "-gencode=arch=compute_90a,code=sm_90a" in spec.cuda_cflags
    assert jit.spec("cuda", capability=(8, 6)).key() != spec.key()
    assert "compute_86,code=sm_86" in jit.spec("cuda", capability=(8, 6)).arch
    assert spec.with_cuda == any(source.suffix == ".cu" for source in spec.sources)


def test_only_hopper_gets_the_hopper_sources():
    hopper, ampere = (jit.spec("cuda", capability=c) for c in ((9, 0), (8, 0)))
    left_out = {source.name for source in hopper.sources} - {s.name for s in ampere.sources}
    assert left_out
    assert all(name.startswith("sm90_") for name in left_out)
    assert not any(source.name.startswith("sm90_") for source in ampere.sources)
    assert "-DUPCONV_SM90" in hopper.cflags
    assert "-DUPCONV_SM90" not in ampere.cflags


@pytest.mark.parametrize("kind", libraries.KINDS)
def test_sources_of_this_package(kind):
    spec = jit.spec(kind)
    other = "cuda" if kind == "cpu" else "cpu"
    stems = [source.stem + source.suffix for source in spec.sources]
    assert len(stems) == len(set(stems)) >= 2, "objects are named by the file's stem"
    assert set(spec.sources) <= set(spec.inputs)
    assert any(file.suffix == ".h" for file in spec.inputs)
    assert not any(other in file.relative_to(recipe.CSRC).as_posix() for file in spec.inputs)


def test_cuda_without_a_cuda_torch_or_nvcc(build_cache, tiny_sources, monkeypatch, tmp_path):
    (tiny_sources / "tiny.cu").write_text("")
    spec = replace(tiny_spec(tiny_sources), sources=(tiny_sources / "tiny.cu",))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in loader.obtain(spec).reason
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(tools, "_find_cuda_home", lambda: None)
    reason = loader.obtain(spec).reason
    assert "nvcc" in reason
    assert "CUDA toolkit 13.0" in reason


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "cmd\na b.cpp:3:4: error: one\nb.cpp:9:4: error: two\nninja: x",
            "a b.cpp:3:4: error: one",
        ),
        ("/usr/bin/ld: cannot find -lc10\nexit", "/usr/bin/ld: cannot find -lc10"),
        (
            "FAILED: a.o\nc++: fatal error: Killed signal terminated program cc1plus\nninja: x",
            "c++: fatal error: Killed signal terminated program cc1plus",
        ),
        ("Traceback\n  File x\nImportError: no torch\n", "ImportError: no torch"),
        ("all\nquiet\n\n", "quiet"),
        ("", "the build said nothing"),
    ],
)
def test_error_line(log, line):
    assert build.error_line(log) == line


def test_prebuild(build_cache, tiny_cpu):
    (result,) = jit.prebuild()
    assert result.built, result.reason
    assert result.seconds > 0
    assert store.find(build_cache, result.path.parent.name) == [result.path]


def test_an_obstacle_is_told_before_anything_is_built(build_cache, tiny_cpu, monkeypatch):
    """What a load would find, at every stage of a library's life; nothing is remembered."""
    assert jit.obstacle("cpu") == ""  # there is a compiler
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(build_cache))
    assert "no C++ compiler was found" in jit.obstacle("cpu")
    assert not build_cache.exists()
    monkeypatch.setenv("PATH", path)
    assert loader.obtain(tiny_cpu).built
    monkeypatch.setenv("PATH", str(build_cache))
    assert jit.obstacle("cpu") == ""  # what is built needs no compiler
    assert loader._results == {}
    monkeypatch.setattr(sys, "platform", "darwin")
    assert jit.obstacle("cpu") == "no kernels are built on darwin"


def test_a_build_that_failed_is_an_obstacle(build_cache, tiny_cpu, tiny_sources):
    (tiny_sources / "tiny.h").write_text("#error out of order\n")
    assert not loader.obtain(tiny_cpu).ok
    reason = jit.obstacle("cpu")
    assert "the build failed: " in reason
    assert "out of order" in reason
    assert str(build_cache / store.LOGS) in reason
    assert reason.endswith("`upconv build cpu` tries again")
    (tiny_sources / "tiny.h").write_text("#define ANSWER 42\n")
    assert jit.obstacle("cpu") == ""  # other sources


def test_what_was_loaded_or_failed_in_this_process_is_what_an_obstacle_is(build_cache, monkeypatch):
    monkeypatch.setitem(loader._results, "cpu", loader.LoadResult("cpu", False, reason="no luck"))
    assert jit.obstacle("cpu") == "no luck"
    monkeypatch.setitem(loader._results, "cpu", loader.LoadResult("cpu", True))
    monkeypatch.setenv("PATH", "/nonexistent")
    assert jit.obstacle("cpu") == ""


@pytest.mark.slow
def test_the_real_library(tmp_path):
    """Built once for the whole test session; then loaded by a process without any tools."""
    result = jit.load("cpu")
    assert result.ok, result.reason
    script = (
        "import sys, torch, upconv.jit as jit; r = jit.load('cpu');"
        "assert r.ok and not r.built, r; assert 'torch.utils.cpp_extension' not in sys.modules"
    )
    environment = {**os.environ, "PATH": "", "PYTHONPATH": str(Path(jit.__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
