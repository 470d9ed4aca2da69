"""Run one build in a child process, and say in one line what went wrong when it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .. import env
from .child import DONE, STARTED, kill_session
from .folder import FolderUnusable
from .manifest import ninja_file
from .recipe import BuildSpec
from .tools import Toolchain, find_ninja

BUILD_LIMIT_S = 1500.0
START_LIMIT_S = 120.0
"""For Python to start and to run the first line of the script."""
_CHILD = Path(__file__).with_name("child.py")
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_ERROR = re.compile(
    r"\berror\b[: ]|undefined (reference|symbol)|cannot find|terminated|Killed|^\w*Error\b", re.I
)
_LOCATED = re.compile(r".+:\d+: (fatal )?error:|\S+ld: |OSError: /.+: ")
_NO_EXEC = "failed to map segment from shared object"
_ENOUGH_ROOM = 1 << 20


class BuildFailed(Exception):
    """The compiler or the linker refused; the text names the reason. `log` is all they said."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log


def compile_library(
    spec: BuildSpec, toolchain: Toolchain, staging: Path, on_wait: Callable[[], None]
) -> Path:
    """Build into the private folder `staging`; returns the library."""
    if not spec.sources:
        raise BuildFailed(f"the sources of the {spec.kind} library are not installed")
    build, scratch, log = staging / "build", staging / "scratch", staging / "build.log"
    build.mkdir()
    scratch.mkdir()
    request = staging / "request.json"
    request.write_text(json.dumps(_request(spec, build)))
    (build / "build.ninja").write_text(ninja_file(spec, toolchain))
    environment = toolchain.environment()
    # The compilers' own temporary files: where there is room for the build, and removed with it.
    environment["TMPDIR"] = str(scratch)
    environment[env.BUILDING] = "1"
    code = _run_child(request, log, environment, on_wait)
    library = build / f"{spec.name}.so"
    if code != 0 or not library.exists():
        _raise_failure(code, log.read_text(errors="replace"), staging)
    return library


def error_line(log: str) -> str:
    """The line of a build log that says most: the first compiler error, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    relevant = [line for line in lines if _ERROR.search(line) and "ninja:" not in line]
    # A compiler names file and line, linker and loader name a file; Python's own last line, which
    # comes after them, says only that something failed.
    located = [line for line in relevant if _LOCATED.match(line)]
    for found in (located, relevant[::-1], lines[::-1]):
        if found:
            return found[0][:400]
    return "the build said nothing"


def _request(spec: BuildSpec, build: Path) -> dict[str, object]:
    try:
        here = os.getcwd()
    except OSError:  # the folder was removed under us; then nothing can be imported from it
        here = "/nowhere"
    jobs = os.environ.get("MAX_JOBS", "")  # as torch's builds take it
    if not jobs.isdigit():
        # ninja's own two more than cores are a fifth slower: of 20 long compilations the last two
        # would start when the first are done. These wait for nothing but the processor.
        jobs = str(2 * len(os.sched_getaffinity(0)))
    return {
        "sys_path": [os.path.join(here, path) for path in sys.path],
        "ninja": [find_ninja() or "ninja", "-v", "-j", jobs],
        "folder": str(build),
        "library": str(build / f"{spec.name}.so"),
    }


def _run_child(
    request: Path, log: Path, environment: dict[str, str], on_wait: Callable[[], None]
) -> int:
    """The exit code of the build; 0 only where it came to its end."""
    if not sys.executable:
        raise BuildFailed("the running Python does not know its own executable (sys.executable)")
    with log.open("wb") as output:
        try:
            # A session of its own: all compilers can be found, and Ctrl-C comes to us alone.
            child = subprocess.Popen(
                [sys.executable, *_isolation(), str(_CHILD), str(request)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=request.parent,
                start_new_session=True,
            )
        except OSError as error:
            raise BuildFailed(f"{sys.executable} cannot be run ({error.strerror})") from error
    done = request.with_name(DONE)
    try:
        _wait(child, request.with_name(STARTED), on_wait)
        # The code is lost, and 0 stands in for it, where this process ignores SIGCHLD.
        return child.returncode if child.returncode or done.exists() else 1
    finally:
        # After a normal end there is nobody left to kill; after Ctrl-C or a crash there is.
        if child.poll() is None or child.returncode < 0 or not (child.returncode or done.exists()):
            kill_session(child.pid)
            child.wait()
        if child.stdin:
            child.stdin.close()


def _wait(child: subprocess.Popen[bytes], started: Path, on_wait: Callable[[], None]) -> None:
    begun = time.monotonic()
    while True:
        try:
            child.wait(timeout=0.1)
            return
        except subprocess.TimeoutExpired:
            on_wait()
        waited = time.monotonic() - begun
        if waited > START_LIMIT_S and not started.exists():
            raise BuildFailed(
                f"{sys.executable} (sys.executable) did not start the build in "
                f"{START_LIMIT_S:.0f} s: it is no Python, or a very slow one"
            )
        if waited > BUILD_LIMIT_S:
            raise BuildFailed(f"the build was stopped after {BUILD_LIMIT_S:.0f} s")


def _isolation() -> list[str]:
    """The flags by which this Python keeps foreign code out, for the child to do so too."""
    flags = sys.flags
    given = {
        "-I": flags.isolated,
        "-E": flags.ignore_environment and not flags.isolated,
        "-s": flags.no_user_site and not flags.isolated,
        "-P": getattr(flags, "safe_path", False) and not flags.isolated,  # since Python 3.11
        "-S": flags.no_site,
    }
    return [flag for flag, is_set in given.items() if is_set]


def _raise_failure(code: int, log: str, staging: Path) -> None:
    if _FULL.search(log) or shutil.disk_usage(staging).free < _ENOUGH_ROOM:
        raise FolderUnusable(f"{staging.parent} is on a full disk (No space left on device)")
    if _NO_EXEC in log:
        raise FolderUnusable(f"{staging.parent} does not allow code to run from it (noexec)")
    reason = error_line(log)
    if code < 0:
        reason = f"the build was ended by signal {-code} ({reason})"
    raise BuildFailed(reason, log)
