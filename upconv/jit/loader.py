"""`load` and its neighbours: the order in which a library is looked for, built and loaded."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import env
from ..libraries import KINDS
from . import folder as folders
from . import store
from .build import BuildFailed, compile_library, error_line
from .recipe import BuildSpec, make_spec
from .tools import Toolchain, find_toolchain, what_is_missing

NOTICE_AFTER_S = 2.0
_NAMES = {
    "cuda_wgrad": "CUDA weight gradient",
    "cuda_fp16": "CUDA FP16",
    "cuda_strict": "CUDA strict float32",
}
_TYPICAL_S = {
    "cpu": "15 s",
    "cuda": "25 s",
    "cuda_wgrad": "20 s",
    "cuda_fp16": "12 s",
    "cuda_strict": "11 s",
}


class UpconvWarning(UserWarning):
    """upconv works, but not as it should: the text says why and what to do."""


@dataclass(frozen=True)
class LoadResult:
    """What became of a library."""

    kind: str
    ok: bool
    path: Path | None = None
    reason: str = ""
    """Why it is not there, and what to do about it; empty when it is."""
    seconds: float = 0.0
    built: bool = False
    """True when this call compiled it, False when it came from the cache."""
    notes: tuple[str, ...] = ()
    """What was out of order although the library is there."""


_results: dict[str, LoadResult] = {}
_mutex = threading.Lock()


def _forget_other_threads() -> None:
    # The thread that held the mutex does not exist in a forked child.
    global _mutex
    _mutex = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


def load(kind: str, capability: tuple[int, int] | None = None) -> LoadResult:
    """Have a library in this process; built first where need be.

    `capability` is the GPU to build for, all visible ones by default; only the first call of a
    process decides. A failure is returned, not raised, unless UPCONV_BACKEND=native.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no library {kind!r}; choose one of {', '.join(KINDS)}")
    backend = env.settings().backend
    result = _results.get(kind)
    if result is None:
        with _mutex:
            result = _results.get(kind)
            first = result is None
            if result is None:
                result = _results[kind] = _load_first(kind, capability)
        if first:
            _warn(result)
    if not result.ok and backend == "native":
        raise RuntimeError(f"UPCONV_BACKEND=native, but {_no_kernels(result)}")
    return result


def obstacle(kind: str) -> str:
    """Why a library is not to be had here; empty where nothing is known to stand in the way.

    What `load` said, where it was asked in this process; else what it would find. Builds nothing.
    """
    result = _results.get(kind)
    if result is not None:
        return result.reason
    try:
        return _ruled_out() or _Attempt(make_spec(kind, None)).obstacle()
    except Exception as error:  # as it would stop `load`
        return _in_words(error)


def spec(kind: str, capability: tuple[int, int] | None = None) -> BuildSpec:
    """What `load` would build."""
    return make_spec(kind, capability)


def prebuild(kinds: Sequence[str] = ("cpu",)) -> list[LoadResult]:
    """Build ahead of the first call, for images and shared installations."""
    return [load(kind) for kind in kinds]


def cache_state() -> store.CacheState:
    """The user's cache folder as it is now, and the one that stands in for it where it exists."""
    state = store.state_of(*folders.usual_folder())
    fallback = store.state_of(folders.fallback_folder(), "fallback")
    return replace(state, fallback=fallback if fallback.exists else None)


def clear() -> int:
    """Remove all builds, logs and leftovers; returns how many builds there were."""
    removed = 0
    for folder, _ in _folders([]):
        if os.path.isdir(folder):
            with folders.locked(folder, on_wait=lambda: None, limit_s=10.0):
                removed += store.remove_all(folder)
    return removed


def _load_first(kind: str, capability: tuple[int, int] | None) -> LoadResult:
    if env.building():
        # An application that is its own sys.executable, and does not say that it is frozen: it was
        # started to build, and would be waited for. Nothing else of a build imports upconv.
        sys.exit("upconv: this process was to build a library, and is an application instead")
    started = time.monotonic()
    try:
        if reason := _ruled_out():
            return LoadResult(kind, False, reason=reason)
        result = obtain(make_spec(kind, capability))
    except Exception as error:  # a call that PyTorch can serve must not fail for our cache's sake
        result = LoadResult(kind, False, reason=_in_words(error))
    return replace(result, seconds=time.monotonic() - started)


def _ruled_out() -> str:
    """Why no library is loaded at all, if so."""
    if env.settings().backend == "aten":
        return "UPCONV_BACKEND=aten asks for PyTorch's kernels"
    return "" if sys.platform == "linux" else f"no kernels are built on {sys.platform}"


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def obtain(spec: BuildSpec) -> LoadResult:
    """Load the library of a spec from the cache, or build it, or say why not. Remembers nothing."""
    attempt = _Attempt(spec)
    for _ in range(3):
        try:
            result = attempt.from_cache() or attempt.from_sources()
        except _SourcesChanged:
            continue
        return replace(result, notes=tuple(attempt.notes))
    return attempt.failure("the sources kept changing while they were being compiled")


class _SourcesChanged(Exception):
    """Somebody edited the sources while they were compiled: what came out has no key."""


@dataclass
class _Attempt:
    spec: BuildSpec
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    noticed: bool = False
    building: bool = False

    def __post_init__(self) -> None:
        self.toolchain: Toolchain = find_toolchain(self.spec)

    def failure(self, reason: str) -> LoadResult:
        return LoadResult(self.spec.kind, False, reason="; ".join([reason, *self.notes]))

    def _look(self) -> None:
        """What the library would be called now, and where it may lie."""
        self.key = self.spec.key()
        self.name = store.entry_name(self.spec, self.key, self.toolchain)
        self.notes.clear()
        self.folders = _folders(self.notes)

    def from_cache(self) -> LoadResult | None:
        self._look()
        for folder, _ in self.folders:
            found = self._load_from(folder)
            if found:
                return found
        self.missing = what_is_missing(self.toolchain)
        if self.missing:
            for folder, _ in self.folders:
                found = self._load_from(folder, any_compiler=True)
                if found:
                    return found
        return None

    def obstacle(self) -> str:
        """What `from_cache` and `from_sources` would fail for, as far as can be seen beforehand."""
        self._look()
        missing = what_is_missing(self.toolchain)
        folders = [folder for folder, _ in self.folders]
        if any(store.find(folder, self.name, any_compiler=bool(missing)) for folder in folders):
            return ""
        logs = [store.log_path(folder, self.name) for folder in folders]
        for log in () if missing else filter(Path.is_file, logs):
            reason = _refused(error_line(log.read_text(errors="replace")), log)
            return f"{reason}; `upconv build {self.spec.kind}` tries again"
        return missing

    def from_sources(self) -> LoadResult:
        if self.missing:
            return self.failure(self.missing)
        for folder, private in self.folders:
            try:
                folders.prepare(folder, private)
                return self._build_in(folder)
            except folders.FolderUnusable as problem:
                self.notes.append(str(problem))
            except BuildFailed as problem:
                return self.failure(str(problem))
        return self.failure("there is no folder to keep the build in")

    def _build_in(self, folder: Path) -> LoadResult:
        with folders.locked(folder, self.notice) as has_lock:
            found = self._load_from(folder)
            if found:
                return found
            self._adopt_failure(folder)
            if has_lock:
                store.remove_leftovers(folder)
            self.building = True
            with store.temporary_folder(folder) as staging:
                library = self._build(folder, staging)
            problem = _dlopen(library)
            if problem:
                raise BuildFailed(f"{library} was built but cannot be loaded: {problem}")
        self.say(f"built the {self.spec.kind} kernel in {time.time() - self.started:.1f} s")
        return LoadResult(self.spec.kind, True, library, built=True)

    def _build(self, folder: Path, staging: Path) -> Path:
        begun = time.monotonic()
        try:
            built = compile_library(self.spec, self.toolchain, staging, self.notice)
            self._check_sources()
            seconds = time.monotonic() - begun
            return store.install(folder, self.name, self.spec, self.toolchain, built, seconds)
        except BuildFailed as problem:
            self._check_sources()
            # Kept while we hold the lock: those who wait for it take it for their own answer.
            raise BuildFailed(self._explain(folder, problem)) from None
        except OSError as error:
            raise folders.FolderUnusable(f"{folder}: {error.strerror or error}") from error

    def _check_sources(self) -> None:
        if self.spec.key() != self.key:
            raise _SourcesChanged

    def _load_from(self, folder: Path, any_compiler: bool = False) -> LoadResult | None:
        for library in store.find(folder, self.name, any_compiler):
            # A sound library that does not load was built for a machine that has changed; it is
            # replaced like a damaged one.
            if not _dlopen(library):
                return LoadResult(self.spec.kind, True, library)
        return None

    def _adopt_failure(self, folder: Path) -> None:
        """Take over the failure of the process we waited for, instead of failing after it."""
        log = store.log_path(folder, self.name)
        try:
            if log.stat().st_mtime >= self.started:
                raise BuildFailed(_refused(error_line(log.read_text(errors="replace")), log))
        except OSError:
            return

    def _explain(self, folder: Path, problem: BuildFailed) -> str:
        if not problem.log:
            return str(problem)
        return _refused(str(problem), store.keep_log(folder, self.name, problem.log))

    def notice(self) -> None:
        """One line to whoever sits in front of a terminal and waits."""
        if not self.noticed and time.time() - self.started > NOTICE_AFTER_S:
            self.noticed = True
            typical = _TYPICAL_S.get(self.spec.kind, "some seconds")
            what = "building" if self.building else "waiting for another process that builds"
            kind = _NAMES.get(self.spec.kind, self.spec.kind.upper())
            self.say(f"{what} the {kind} kernel, about {typical}, once per machine")

    def say(self, text: str) -> None:
        if sys.stderr and (env.settings().verbose or (self.noticed and _is_terminal())):
            with suppress(OSError, ValueError):  # closed, or on a full disk: that is not our matter
                # One write, unlike print: many processes may be saying this at once.
                sys.stderr.write(f"upconv: {text}\n")
                sys.stderr.flush()


def _folders(notes: list[str]) -> list[tuple[Path, bool]]:
    """The cache folders in order of preference, and whether each is private by construction."""
    usual, source = folders.usual_folder()
    candidates = [(folders.fallback_folder(), True)]
    if usual is None:
        notes.append(f"there is {source}")
    else:
        candidates.insert(0, (folders.real_folder(usual), False))
    chosen = []
    for folder, private in candidates:
        problem = folders.trust_problem(folder) if os.path.lexists(folder) else ""
        if problem:
            notes.append(problem)
        else:
            chosen.append((folder, private))
    return chosen


def _refused(reason: str, kept: Path | None) -> str:
    place = f" (the compiler's whole output is in {kept})" if kept else ""
    return f"the build failed: {reason}{place}"


def _dlopen(library: Path) -> str:
    """Load the library; returns why that failed, empty when it did not."""
    import torch

    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return ""


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def _no_kernels(result: LoadResult) -> str:
    return f"upconv's {result.kind} kernels are not available: {result.reason}"


def _users_level() -> int:
    """The stacklevel, for who called this, of the line that is neither upconv's nor PyTorch's."""
    import torch

    inside = tuple(
        os.path.join(os.path.dirname(os.path.abspath(file)), "")
        for file in (env.__file__, torch.__file__)
    )
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(inside) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def _warn(result: LoadResult) -> None:
    if not result.ok and env.settings().backend == "auto":
        text = f"{_no_kernels(result)}. PyTorch's kernels are used instead."
        warnings.warn(text, UpconvWarning, stacklevel=_users_level())
    elif result.ok and result.notes:
        text = (
            f"the usual build cache was not used: {'; '.join(result.notes)}. The build is kept in "
            f"{result.path and result.path.parent.parent}; set UPCONV_CACHE_DIR to a folder that "
            "only you can write to."
        )
        warnings.warn(text, UpconvWarning, stacklevel=_users_level())
