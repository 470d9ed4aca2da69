"""The entries of a cache folder: find, check, install, list, remove.

    <folder>/lock                          see folder.py
    <folder>/<kind>-<key>-<compiler>/      one finished build, moved into place whole
        upconv_<kind>.so
        manifest.json                      size and SHA-256 of the library, what the key was made of
    <folder>/upconv-tmp-<host>-<random>/   a build under way
    <folder>/upconv-logs/                  compiler output of failed builds

An entry is checked against its manifest before it is loaded, because loading a truncated library
does not fail: it kills the process (SIGBUS).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import folder as folders
from .recipe import BuildSpec
from .tools import Toolchain, compiler_version

MANIFEST = "manifest.json"
LOGS = "upconv-logs"
_ENTRY = re.compile(r"[a-z0-9_]+-[0-9a-f]{16}-[0-9a-f]{8}")


@dataclass(frozen=True)
class Entry:
    """A finished build, as `cache_state` reports it."""

    name: str
    kind: str
    path: Path
    size: int
    age_s: float
    problem: str
    """Why it would not be loaded; empty when it would."""
    manifest: dict[str, object] = field(repr=False)


@dataclass(frozen=True)
class CacheState:
    """One cache folder as it is now."""

    folder: Path | None
    source: str
    """What named the folder: UPCONV_CACHE_DIR, XDG_CACHE_HOME, home, or fallback."""
    exists: bool = False
    writable: bool = False
    trusted: bool = False
    problem: str = ""
    entries: tuple[Entry, ...] = ()
    temporary: tuple[Path, ...] = ()
    """Builds under way; left behind by dead processes when nobody holds the lock."""
    logs: tuple[Path, ...] = ()
    lock_holder: str = ""
    fallback: CacheState | None = None


def entry_name(spec: BuildSpec, key: str, toolchain: Toolchain) -> str:
    return f"{spec.kind}-{key}-{toolchain.fingerprint[:8]}"


def find(folder: Path, name: str, any_compiler: bool = False) -> list[Path]:
    """The libraries that may be loaded for an entry name, best first; none is the usual answer.

    `any_compiler` also takes builds made by another compiler than the one found now.
    """
    try:
        if not os.path.isdir(folder) or folders.trust_problem(folder):
            return []
    except OSError:
        return []
    entries = [folder / name]
    if any_compiler:
        family = name.rpartition("-")[0]
        entries += sorted(e for e in folder.glob(f"{family}-*") if e.name != name)
    return [entry / _library_name(entry) for entry in entries if not entry_problem(entry)]


def entry_problem(entry: Path) -> str:
    """Why the entry must not be loaded; empty when it may be."""
    library, manifest = entry / _library_name(entry), entry / MANIFEST
    try:
        for path in (entry, library, manifest):
            problem = folders.trust_problem(path)
            if problem:
                return problem
        record = read_manifest(entry)
        if library.stat().st_size != record.get("size"):
            return f"{library} is {library.stat().st_size} bytes, not {record.get('size')}"
        if _sha256(library) != record.get("sha256"):
            return f"{library} has changed since it was built"
    except (OSError, ValueError) as error:
        return f"{entry} cannot be read ({error})"
    return ""


def read_manifest(entry: Path) -> dict[str, object]:
    record = json.loads((entry / MANIFEST).read_bytes())
    if not isinstance(record, dict):
        raise ValueError(f"{entry / MANIFEST} is not a manifest")
    return record


def _library_name(entry: Path) -> str:
    return f"upconv_{entry.name.split('-')[0]}.so"


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A private folder on the same file system, gone afterwards whatever happens."""
    try:
        path = Path(tempfile.mkdtemp(prefix=_temporary_prefix(), dir=folder))
    except OSError as error:
        raise folders.FolderUnusable(f"{folder} cannot be written to ({error.strerror})") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def install(
    folder: Path, name: str, spec: BuildSpec, toolchain: Toolchain, built: Path, seconds: float
) -> Path:
    """Move a freshly built library into place, whole and durable, and return its new path."""
    staged = built.parent.parent / "entry"
    staged.mkdir(mode=0o755)
    library = staged / f"{spec.name}.so"
    os.replace(built, library)
    # The linker follows the umask; a library that others may write to would never be loaded.
    library.chmod(0o755)
    record = {
        "kind": spec.kind,
        "size": library.stat().st_size,
        "sha256": _sha256(library),
        "built_at": time.time(),
        "seconds": round(seconds, 2),
        "compiler": compiler_version(toolchain.cxx or ""),
        "key": spec.parts(),
    }
    manifest = staged / MANIFEST
    manifest.write_text(json.dumps(record, indent=1))
    manifest.chmod(0o644)
    for path in (library, manifest, staged):
        _sync(path)
    entry = folder / name
    if entry.is_symlink() or entry.exists():
        os.rename(entry, staged.parent / "damaged")
    os.rename(staged, entry)
    _sync(folder)
    log_path(folder, name).unlink(missing_ok=True)
    return entry / library.name


def remove_leftovers(folder: Path) -> None:
    """Remove what killed builds left. Only for the holder of the lock: nobody else is building.

    Nobody on this machine, that is: over a network the lock may not reach, so what another machine
    left stays for as long as a build could possibly take.
    """
    for path in folder.glob(f"{folders.TEMPORARY}*"):
        ours = path.name.startswith(_temporary_prefix())
        if ours or _age(path) > 2 * folders.LOCK_LIMIT_S:
            shutil.rmtree(path, ignore_errors=True)


def _temporary_prefix() -> str:
    return f"{folders.TEMPORARY}{socket.gethostname()}-"


def _age(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def keep_log(folder: Path, name: str, text: str) -> Path | None:
    """Write a failed build's output where it can be found; None when there is no room for it."""
    path = log_path(folder, name)
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        path.write_text(text)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    return path


def log_path(folder: Path, name: str) -> Path:
    return folder / LOGS / f"{name}.log"


def state_of(folder: Path | None, source: str) -> CacheState:
    """Look at a cache folder without changing anything."""
    if folder is None:
        return CacheState(None, source, problem="there is no home folder")
    folder = folders.real_folder(folder)
    if not os.path.isdir(folder):
        above = next(parent for parent in folder.parents if os.path.lexists(parent))
        writable = (
            not os.path.lexists(folder) and os.path.isdir(above) and os.access(above, os.W_OK)
        )
        problem = "" if writable else f"{folder} cannot be made"
        return CacheState(folder, source, writable=writable, problem=problem)
    problem = folders.trust_problem(folder)
    names = sorted(folder.iterdir()) if os.access(folder, os.R_OK) else []
    builds = [path for path in names if _ENTRY.fullmatch(path.name)]
    return CacheState(
        folder,
        source,
        exists=True,
        writable=os.access(folder, os.W_OK),
        trusted=not problem,
        problem=problem,
        entries=tuple(_report(path) for path in builds),
        temporary=tuple(p for p in names if p.name.startswith(folders.TEMPORARY)),
        logs=tuple(sorted((folder / LOGS).glob("*.log"))),
        lock_holder=folders.lock_holder(folder),
    )


def _report(entry: Path) -> Entry:
    manifest: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        manifest = read_manifest(entry)
    size = 0
    with contextlib.suppress(OSError):
        size = sum(file.lstat().st_size for file in entry.iterdir())
    kind = entry.name.split("-")[0]
    return Entry(entry.name, kind, entry, size, _age(entry), entry_problem(entry), manifest)


def remove_all(folder: Path) -> int:
    """Remove every build, log and leftover of a folder; the caller holds the lock."""
    entries = [path for path in folder.iterdir() if _ENTRY.fullmatch(path.name)]
    for path in entries:
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    shutil.rmtree(folder / LOGS, ignore_errors=True)
    remove_leftovers(folder)
    return len(entries)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
