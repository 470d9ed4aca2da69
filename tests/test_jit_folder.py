"""The cache folder: where it is, what makes it unusable, and whom it is safe to load code from."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from jit_helpers import entries, leftovers, tiny_spec, warnings_of

from upconv import env, jit, libraries
from upconv.jit import folder, loader, store

pytest_plugins = ["jit_fixtures"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")


@pytest.fixture
def tiny_cpu(monkeypatch, tiny_sources):
    """Makes `load("cpu")` mean the tiny library."""
    spec = replace(tiny_spec(tiny_sources), kind="cpu")
    monkeypatch.setattr(loader, "make_spec", lambda kind, capability: spec)
    return spec


@pytest.fixture
def fallback(tmp_path):
    """Where builds go when the usual folder will not do; TMPDIR is the test's own folder."""
    return tmp_path / f"upconv-{os.geteuid()}"


@contextlib.contextmanager
def mounted(place: Path, options: str):
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {run.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def load_with_warnings():
    results = []
    texts = warnings_of(lambda: results.append(jit.load("cpu")))
    return results[0], texts


def check_fallback(fallback, expected_in_warning):
    """The library was built in the private folder, with exactly one warning that says why."""
    result, texts = load_with_warnings()
    assert result.ok, result.reason
    assert result.path.parent.parent == fallback
    assert stat.S_IMODE(fallback.stat().st_mode) == 0o700
    assert len(texts) == 1
    assert expected_in_warning in texts[0]
    assert str(fallback) in texts[0]
    assert "UPCONV_CACHE_DIR" in texts[0]
    assert leftovers(fallback) == []
    return texts[0]


def test_missing_folder_is_made(build_cache, tiny_cpu, monkeypatch):
    deep = build_cache / "not" / "there" / "yet"
    monkeypatch.setenv("UPCONV_CACHE_DIR", str(deep))
    env.reload()
    result, texts = load_with_warnings()
    assert result.built, result.reason
    assert texts == []
    assert result.path.parent.parent == deep
    assert stat.S_IMODE(deep.stat().st_mode) & 0o022 == 0


def test_folder_that_cannot_be_made(build_cache, tiny_cpu, fallback):
    build_cache.write_text("a file where the folder should be")
    check_fallback(fallback, "is not a folder")


def test_folder_below_a_file(build_cache, tiny_cpu, fallback, monkeypatch):
    build_cache.write_text("a file where the parent folder should be")
    monkeypatch.setenv("UPCONV_CACHE_DIR", str(build_cache / "below"))
    env.reload()
    check_fallback(fallback, "cannot be made")
    # Warm: the same folder serves the next process.
    monkeypatch.setattr(loader, "_results", {})
    assert not jit.load("cpu").built


def test_read_only_folder(build_cache, tiny_cpu, fallback):
    with mounted(build_cache, "size=1m,mode=755,ro"):
        check_fallback(fallback, "Read-only file system")


def test_read_only_folder_with_the_build_in_it(build_cache, built_tiny):
    """A cache made ahead of time, as in a container image, needs no writing at all."""
    with mounted(build_cache, "size=1m,mode=755"):
        shutil.copytree(built_tiny.folder, build_cache, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", str(build_cache)], check=True)
        result = loader.obtain(tiny_spec(built_tiny.sources))
        assert result.ok, result.reason
        assert not result.built
        assert result.notes == ()
        assert not jit.cache_state().writable


@pytest.mark.parametrize("room", ["8k", "24k", "40k"])
def test_full_disk(build_cache, tiny_cpu, fallback, room):
    with mounted(build_cache, f"size={room},mode=755"):
        text = check_fallback(fallback, "No space left on device")
        assert str(build_cache) in text
        assert leftovers(build_cache) == []
        assert entries(build_cache) == []


def test_full_disk_and_nowhere_else_to_go(build_cache, tiny_cpu, monkeypatch):
    with mounted(build_cache, "size=40k,mode=755"):
        monkeypatch.setenv("TMPDIR", str(build_cache))
        result, texts = load_with_warnings()
        assert not result.ok
        assert "No space left on device" in result.reason
        assert len(texts) == 1
        assert result.reason in texts[0]


def test_folder_that_code_may_not_run_from(build_cache, tiny_cpu, fallback):
    with mounted(build_cache, "size=10m,mode=755,noexec"):
        check_fallback(fallback, "noexec")


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_folder_that_others_can_write_to(build_cache, built_tiny, mode):
    shutil.copytree(built_tiny.folder, build_cache)
    (entry,) = entries(build_cache)
    assert store.find(build_cache, entry.name)
    build_cache.chmod(mode)
    assert store.find(build_cache, entry.name) == []
    with pytest.raises(folder.FolderUnusable, match="other users"):
        folder.prepare(build_cache, private=False)
    state = jit.cache_state()
    assert not state.trusted
    assert "chmod go-w" in state.problem


def test_untrusted_folder_is_replaced(build_cache, tiny_cpu, fallback):
    build_cache.mkdir()
    build_cache.chmod(0o777)
    check_fallback(fallback, "can be written to by other users (mode 0777")
    assert list(build_cache.iterdir()) == [], "and nothing is written there"


@needs_root
def test_folder_of_another_user(build_cache, built_tiny):
    shutil.copytree(built_tiny.folder, build_cache)
    (entry,) = entries(build_cache)
    for path in (build_cache, entry, entry / "upconv_tiny.so", entry / "manifest.json"):
        assert store.find(build_cache, entry.name)
        os.chown(path, 12345, 12345)
        assert store.find(build_cache, entry.name) == [], path
        os.chown(path, 0, 0)


def test_entry_that_others_can_write_to(build_cache, built_tiny):
    shutil.copytree(built_tiny.folder, build_cache)
    (entry,) = entries(build_cache)
    for path in (entry, entry / "upconv_tiny.so", entry / "manifest.json"):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | 0o020)
        assert store.find(build_cache, entry.name) == [], path
        path.chmod(mode)
    assert store.find(build_cache, entry.name)


def test_links_out_of_the_folder_are_refused(build_cache, built_tiny, tmp_path):
    shutil.copytree(built_tiny.folder, build_cache)
    (entry,) = entries(build_cache)
    library = entry / "upconv_tiny.so"
    elsewhere = tmp_path / "elsewhere"
    shutil.move(library, elsewhere)
    library.symlink_to(elsewhere)
    assert store.find(build_cache, entry.name) == []
    library.unlink()
    shutil.move(elsewhere, library)
    assert store.find(build_cache, entry.name)
    shutil.move(entry, elsewhere)
    entry.symlink_to(elsewhere)
    assert store.find(build_cache, entry.name) == []


def test_cache_folder_itself_may_be_a_link(build_cache, built_tiny, tmp_path):
    """Homes are small and scratch disks are large: people do that."""
    shutil.copytree(built_tiny.folder, tmp_path / "scratch")
    build_cache.symlink_to(tmp_path / "scratch")
    result = loader.obtain(tiny_spec(built_tiny.sources))
    assert result.ok, result.reason
    assert not result.built


@needs_root
def test_name_of_the_fallback_is_taken(build_cache, built_tiny, tmp_path, fallback, monkeypatch):
    """Anybody can make /tmp/upconv-<uid>; nothing is loaded from it or written to it."""
    shutil.copytree(built_tiny.folder, fallback)
    os.chown(fallback, 12345, 12345)
    build_cache.write_text("not a folder")
    before = sorted(fallback.rglob("*"))
    result = loader.obtain(tiny_spec(built_tiny.sources))
    assert result.built, result.reason
    own = result.path.parent.parent
    assert own.name.startswith(f"{fallback.name}-")
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert sorted(fallback.rglob("*")) == before
    again = loader.obtain(tiny_spec(built_tiny.sources))
    assert again.path == result.path
    assert not again.built


@needs_root
def test_another_user_reads_what_root_built(build_cache, built_tiny, tmp_path):
    """Root's cache serves everybody, and a user who cannot write to it is told where to build."""
    shutil.copytree(built_tiny.folder, build_cache)
    (entry,) = entries(build_cache)
    for path in (*tmp_path.parents, tmp_path):
        if path.stat().st_uid == 0 and path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            found = store.find(build_cache, entry.name)
            try:
                with folder.locked(build_cache, lambda: None):
                    pass
            except folder.FolderUnusable as problem:
                code = 0 if found and "Permission denied" in str(problem) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_usual_folder(build_cache, tmp_path, monkeypatch):
    assert folder.usual_folder() == (build_cache, "UPCONV_CACHE_DIR")
    monkeypatch.delenv("UPCONV_CACHE_DIR")
    env.reload()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folder.usual_folder() == (tmp_path / "xdg" / "upconv", "XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/do/not/count")
    assert folder.usual_folder() == (tmp_path / ".cache" / "upconv", "home")


def test_no_home_at_all(build_cache, tiny_cpu, fallback, monkeypatch):
    monkeypatch.delenv("UPCONV_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    env.reload()
    # What expanduser answers for a user whom the system does not know, as in many containers.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    check_fallback(fallback, "no home folder")


def test_cache_state_and_clear(build_cache, built_tiny):
    assert jit.cache_state() == store.CacheState(build_cache, "UPCONV_CACHE_DIR", writable=True), (
        "looking does not make the folder"
    )
    shutil.copytree(built_tiny.folder, build_cache)
    (entry,) = entries(build_cache)
    (build_cache / "upconv-tmp-somewhere-1").mkdir()
    (build_cache / "upconv-logs").mkdir()
    (build_cache / "upconv-logs" / "a.log").touch()
    (build_cache / "not-ours.txt").touch()
    with folder.locked(build_cache, lambda: None):
        state = jit.cache_state()
        assert f"process {os.getpid()}" in state.lock_holder
    assert state.exists
    assert state.trusted
    (build,) = state.entries
    assert (build.kind, build.path, build.problem) == ("tiny", entry, "")
    assert build.size > (entry / "upconv_tiny.so").stat().st_size
    assert [path.name for path in state.temporary] == ["upconv-tmp-somewhere-1"]
    assert [path.name for path in state.logs] == ["a.log"]
    os.truncate(entry / "upconv_tiny.so", 100)
    assert "100 bytes" in jit.cache_state().entries[0].problem
    assert jit.clear() == 1
    assert jit.cache_state().entries == ()
    assert jit.cache_state().lock_holder == ""
    assert sorted(path.name for path in build_cache.iterdir()) == [
        "lock",
        "not-ours.txt",
        "upconv-tmp-somewhere-1",
    ]
    assert jit.clear() == 0


def test_builds_of_every_kind_are_listed_and_cleared(build_cache, built_tiny):
    (entry,) = entries(built_tiny.folder)
    rest = entry.name.removeprefix("tiny")
    for kind in libraries.KINDS:
        shutil.copytree(entry, build_cache / (kind + rest))
    assert sorted(build.kind for build in jit.cache_state().entries) == sorted(libraries.KINDS)
    assert jit.clear() == len(libraries.KINDS)
    assert jit.cache_state().entries == ()


def test_cache_state_of_impossible_folders(build_cache, monkeypatch):
    build_cache.write_text("a file")
    assert not jit.cache_state().writable
    monkeypatch.setenv("UPCONV_CACHE_DIR", str(build_cache / "below"))
    env.reload()
    state = jit.cache_state()
    assert not state.writable
    assert "cannot be made" in state.problem
