"""Builds among other processes: killed, interrupted, forked, raced; and damaged libraries.

Real processes and a real compiler, slowed down by a script in front of it where a test has to act
in the middle of a build.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from jit_helpers import (
    ROOT,
    compilations,
    entries,
    finish,
    finish_all,
    is_running,
    leftovers,
    start,
    tiny_spec,
    wait_until,
    write_compiler,
)

from upconv import env
from upconv.jit import folder, loader, store

pytest_plugins = ["jit_fixtures"]


@pytest.fixture
def slow_compiler(tmp_path):
    """A compiler that takes a minute, until the file `go` appears beside it."""
    waiting = f"i=0; while [ ! -e {tmp_path}/bin/go ] && [ $i -lt 600 ]; do sleep 0.1; i=$((i+1));"
    return write_compiler(tmp_path / "bin", before=f"{waiting} done")


def start_and_wait_for_compiler(sources, cache, compiler):
    process = start(sources, cache, CXX=str(compiler))
    wait_until(lambda: compilations(compiler.parent))
    return process


def test_kill_9_during_a_build(build_cache, tiny_sources, slow_compiler):
    process = start_and_wait_for_compiler(tiny_sources, build_cache, slow_compiler)
    process.kill()
    process.communicate()
    # The compilers die with it, and no entry comes of it.
    (compiler_pid,) = compilations(slow_compiler.parent)
    wait_until(lambda: not is_running(compiler_pid))
    assert len(leftovers(build_cache)) == 1
    assert entries(build_cache) == []
    # The next process is not held up by a stale lock, builds, and clears up.
    (slow_compiler.parent / "go").touch()
    answer = finish(start(tiny_sources, build_cache, CXX=str(slow_compiler)))
    assert answer["built"], answer["reason"]
    assert leftovers(build_cache) == []
    assert len(entries(build_cache)) == 1


def test_ctrl_c_during_a_build(build_cache, tiny_sources, slow_compiler):
    process = start_and_wait_for_compiler(tiny_sources, build_cache, slow_compiler)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    (compiler_pid,) = compilations(slow_compiler.parent)
    wait_until(lambda: not is_running(compiler_pid))
    assert leftovers(build_cache) == []
    assert entries(build_cache) == []
    assert folder.lock_holder(build_cache) == ""


@pytest.mark.parametrize("sound", [True, False], ids=["sound", "broken"])
def test_eight_processes_at_once(build_cache, tiny_sources, slow_compiler, sound):
    """Exactly one compiles; a failure too is shared, not repeated eight times."""
    if not sound:
        (tiny_sources / "tiny.h").write_text("#define ANSWER forty_two\n")
    process = start(tiny_sources, build_cache, count=8, CXX=str(slow_compiler))
    wait_until(lambda: count_openers(build_cache / folder.LOCK_FILE) == 8)
    slow_compiler.with_name("go").touch()
    answers = finish_all(process)
    assert len(answers) == 8
    assert len(compilations(slow_compiler.parent)) == 1
    assert leftovers(build_cache) == []
    if sound:
        assert all(answer["ok"] for answer in answers)
        assert sum(bool(answer["built"]) for answer in answers) == 1
    else:
        assert not any(answer["ok"] for answer in answers)
        assert all("forty_two" in str(answer["reason"]) for answer in answers)


def count_openers(file):
    """How many processes have the file open: for a lock file, those in its queue."""
    count = 0
    for process in os.listdir("/proc"):
        try:
            links = [os.readlink(link.path) for link in os.scandir(f"/proc/{process}/fd")]
        except OSError:
            continue
        count += str(file) in links
    return count


def test_truncated_library_is_rebuilt(build_cache, built_tiny):
    """In a process of its own, since loading it would kill the process (see the next test)."""
    shutil.copytree(built_tiny.folder, build_cache)
    (entry,) = entries(build_cache)
    os.truncate(entry / "upconv_tiny.so", 4096)
    answer = finish(start(built_tiny.sources, build_cache))
    assert answer["ok"], answer["reason"]
    assert answer["built"]
    assert store.entry_problem(entry) == ""
    assert leftovers(build_cache) == []


@pytest.mark.parametrize("damage", ["changed", "empty", "no manifest", "bad manifest", "gone"])
def test_damage_is_seen_before_loading(build_cache, built_tiny, damage):
    shutil.copytree(built_tiny.folder, build_cache)
    (entry,) = entries(build_cache)
    library, manifest = entry / "upconv_tiny.so", entry / "manifest.json"
    assert store.find(build_cache, entry.name) == [library]
    if damage == "changed":
        whole = library.read_bytes()
        library.write_bytes(whole[:5000] + b"\xff" * 200 + whole[5200:])
    elif damage == "empty":
        os.truncate(library, 0)
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text("[1, 2")
    else:
        library.unlink()
    assert store.find(build_cache, entry.name) == []
    assert store.entry_problem(entry)


def test_truncated_library_would_crash(built_tiny, tmp_path):
    """The reason for checking before loading; should this ever fail, the check can go."""
    (entry,) = entries(built_tiny.folder)
    broken = tmp_path / "broken.so"
    broken.write_bytes((entry / "upconv_tiny.so").read_bytes()[:4096])
    script = f"import ctypes; ctypes.CDLL({str(broken)!r})"
    run = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert run.returncode == -signal.SIGBUS


FORKING = """
import json, os, sys, threading, time
from pathlib import Path
sys.path[:0] = {path!r}
import torch
from jit_helpers import compilations, tiny_spec, wait_until
from upconv.jit import loader
sources, bin = Path(sys.argv[1]), Path(sys.argv[2])
loader.make_spec = lambda kind, capability: tiny_spec(sources)
results = []
thread = threading.Thread(target=lambda: results.append(loader.load("cpu")))
thread.start()
wait_until(lambda: compilations(bin))
child = os.fork()
if child == 0:
    # The other thread, which holds the mutex, is not here; the lock file is the parent's.
    {in_child}
{in_parent}
"""


def _run_forking(build_cache, sources, compiler, in_child, in_parent):
    path = [str(ROOT), str(ROOT / "tests")]
    script = FORKING.format(path=path, in_child=in_child, in_parent=in_parent)
    environment = {**os.environ, "UPCONV_CACHE_DIR": str(build_cache), "CXX": str(compiler)}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(sources), str(compiler.parent)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_fork_during_a_build(build_cache, tiny_sources, slow_compiler):
    """The child asks for the same library while the parent's thread is building it."""
    process = _run_forking(
        build_cache,
        tiny_sources,
        slow_compiler,
        in_child="(bin / 'go').touch(); os._exit(0 if loader.load('cpu').ok else 1)",
        in_parent="code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]); thread.join();"
        "print(code, results[0].ok, results[0].built)",
    )
    output, _ = process.communicate(timeout=60)
    assert output.split() == ["0", "True", "True"]
    assert len(compilations(slow_compiler.parent)) == 1


def test_forked_child_does_not_keep_the_lock(build_cache, tiny_sources, slow_compiler):
    """The parent is killed during the build, the forked child lives on: nobody has to wait."""
    process = _run_forking(
        build_cache,
        tiny_sources,
        slow_compiler,
        in_child="print(os.getpid(), flush=True); time.sleep(100)",
        in_parent="thread.join()",
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert str(process.pid) in folder.lock_holder(build_cache)
        process.kill()
        process.wait()
        wait_until(lambda: folder.lock_holder(build_cache) == "")
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_threads_share_one_build(build_cache, tiny_sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "bin")))
    monkeypatch.setattr(loader, "make_spec", lambda kind, capability: tiny_spec(tiny_sources))
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(loader.load("cpu"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(result is results[0] for result in results)
    assert results[0].ok
    assert len(compilations(tmp_path / "bin")) == 1


def test_waiting_has_an_end(build_cache, monkeypatch):
    build_cache.mkdir()
    with (
        folder.locked(build_cache, lambda: None),
        pytest.raises(folder.FolderUnusable, match=f"by process {os.getpid()} on"),
        folder.locked(build_cache, lambda: None, limit_s=0.1),
    ):
        pass
    # Free again, for us and for everybody.
    with folder.locked(build_cache, lambda: None, limit_s=0.1) as has_lock:
        assert has_lock


def test_leftovers_of_another_machine_stay_for_a_while(build_cache, tiny_sources):
    build_cache.mkdir()
    young, old = build_cache / "upconv-tmp-elsewhere-1", build_cache / "upconv-tmp-elsewhere-2"
    young.mkdir()
    old.mkdir()
    os.utime(old, (0, 0))
    assert loader.obtain(tiny_spec(tiny_sources)).built
    assert leftovers(build_cache) == [young]


def test_file_system_without_locks(build_cache, tiny_sources, monkeypatch):
    """As on some network file systems: built all the same, and nobody else's work is removed."""
    import errno
    import fcntl

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    build_cache.mkdir()
    other = build_cache / f"{store._temporary_prefix()}other"
    other.mkdir()
    assert loader.obtain(tiny_spec(tiny_sources)).built
    assert leftovers(build_cache) == [other]


def test_one_line_for_who_waits(build_cache, tiny_sources, slow_compiler):
    """The builder says once what takes so long, and so does who waits for it."""
    process = start(tiny_sources, build_cache, count=2, CXX=str(slow_compiler), UPCONV_VERBOSE="1")
    assert process.stderr is not None
    lines = sorted(process.stderr.readline() for _ in range(2))
    slow_compiler.with_name("go").touch()
    _, rest = process.communicate(timeout=60)
    assert lines[0].startswith("upconv: building the TINY kernel, about ")
    assert lines[1].startswith("upconv: waiting for another process that builds the TINY kernel")
    assert rest.startswith("upconv: built the tiny kernel in ")
    assert rest.count("\n") == 1


def test_notice_needs_a_terminal(tiny_sources, monkeypatch, capsys):
    monkeypatch.delenv("UPCONV_VERBOSE", raising=False)
    env.reload()
    for terminal in (False, True):
        monkeypatch.setattr(loader, "_is_terminal", lambda answer=terminal: answer)
        attempt = loader._Attempt(tiny_spec(tiny_sources))
        attempt.notice()
        assert capsys.readouterr().err == "", "nothing is said in the first two seconds"
        attempt.started -= 3
        attempt.notice()
        attempt.notice()
        assert capsys.readouterr().err.count("\n") == int(terminal)
