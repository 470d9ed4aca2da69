"""The process that builds: what it is started with, and where it cannot be started at all."""

from __future__ import annotations

import io
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jit_helpers import ROOT, entries, finish, leftovers, start, tiny_spec, write_compiler

from upconv import env, jit
from upconv.exporter import ExportError, model_file
from upconv.jit import build, loader

pytest_plugins = ["jit_fixtures"]


def executable(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_frozen_application_is_never_started_again(
    build_cache, tiny_sources, built_tiny, tmp_path, monkeypatch
):
    app = executable(tmp_path / "app", f"echo started >> {tmp_path}/log")
    monkeypatch.setattr(sys, "executable", app)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    result = loader.obtain(tiny_spec(tiny_sources))
    assert not result.ok
    assert "frozen application" in result.reason
    assert "UPCONV_CACHE_DIR" in result.reason
    with pytest.raises(ExportError, match="frozen application"):
        model_file.read(Path(__file__))
    # What an ordinary Python has built serves it, whichever compiler that had.
    shutil.copytree(built_tiny.folder, build_cache)
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "bin")))
    result = loader.obtain(tiny_spec(built_tiny.sources))
    assert result.ok
    assert not result.built
    assert not (tmp_path / "log").exists()


def test_an_application_that_is_started_to_build_ends_at_once(
    build_cache, tiny_sources, tmp_path, monkeypatch
):
    """As with packers that do not set sys.frozen: its first call of upconv ends the process."""
    app = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]!r}\n"
        "import time\n"
        "from upconv import jit\n"
        "jit.load('cpu')\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "app.py").write_text(app)
    command = f"exec {sys.executable} {tmp_path}/app.py"
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "app", command))
    result = loader.obtain(tiny_spec(tiny_sources))
    assert not result.ok
    assert "this process was to build a library, and is an application" in result.reason
    assert leftovers(build_cache) == []


def test_nothing_is_loaded_in_the_process_that_builds(monkeypatch):
    monkeypatch.setattr(loader, "_results", {})
    monkeypatch.setenv(env.BUILDING, "1")
    with pytest.raises(SystemExit, match="was to build a library"):
        jit.load("cpu")


def test_an_executable_that_never_starts_the_build(
    build_cache, tiny_sources, tmp_path, monkeypatch
):
    """As a web server that holds an interpreter: sys.executable is the server."""
    monkeypatch.setattr(build, "START_LIMIT_S", 0.2)
    server = executable(tmp_path / "server", "exec sleep 600")
    monkeypatch.setattr(sys, "executable", server)
    result = loader.obtain(tiny_spec(tiny_sources))
    assert not result.ok
    assert f"{server} (sys.executable) did not start the build" in result.reason
    assert leftovers(build_cache) == []


@pytest.mark.parametrize("flags", [("-I",), ("-E", "-s")])
def test_the_flags_that_keep_foreign_code_out_hold_for_the_build(
    flags, build_cache, tiny_sources, tmp_path
):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "contextlib.py").write_text("raise SystemExit('foreign code')\n")
    answer = finish(start(tiny_sources, build_cache, flags=flags, PYTHONPATH=str(foreign)))
    assert answer["built"], answer["reason"]


def test_flags_as_they_are_handed_on(monkeypatch):
    class Flags:
        isolated, ignore_environment, no_user_site, safe_path, no_site = 0, 1, 1, True, 0

    monkeypatch.setattr(sys, "flags", Flags)
    assert build._isolation() == ["-E", "-s", "-P"]
    Flags.isolated = 1
    assert build._isolation() == ["-I"]


def ignore_children():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@pytest.mark.parametrize("sound", [True, False], ids=["sound", "broken"])
def test_a_process_that_ignores_its_children(sound, build_cache, tiny_sources):
    """Many servers do. The child's exit code is lost then, and a failure must still be one."""
    if not sound:
        # Compiles and links; only loading it shows what is wrong.
        (tiny_sources / "tiny.cpp").write_text(
            'int nowhere();\nstatic int x = nowhere();\nextern "C" int upconv_answer() '
            "{ return x; }\n"
        )
    answer = finish(start(tiny_sources, build_cache, before=ignore_children))
    assert answer["ok"] == answer["built"] == sound, answer["reason"]
    assert len(entries(build_cache)) == sound
    assert sound or "undefined symbol" in str(answer["reason"])


def test_a_quote_in_cxx_that_is_never_closed(build_cache, built_tiny, tiny_sources, monkeypatch):
    monkeypatch.setenv("CXX", "g++ -DX='a")
    reason = loader.obtain(tiny_spec(tiny_sources)).reason
    assert "CXX=g++ -DX='a cannot be read: No closing quotation" in reason
    shutil.copytree(built_tiny.folder, build_cache)
    assert loader.obtain(tiny_spec(built_tiny.sources)).ok


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed")])
def test_what_cannot_be_said_does_not_spoil_a_build(error, build_cache, tiny_sources, monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise error

    monkeypatch.setenv("UPCONV_VERBOSE", "1")
    env.reload()
    spec = replace(tiny_spec(tiny_sources), kind="cpu")
    monkeypatch.setattr(loader, "make_spec", lambda kind, capability: spec)
    monkeypatch.setattr(sys, "stderr", Broken())
    result = jit.load("cpu")
    monkeypatch.undo()
    assert result.built, result.reason
