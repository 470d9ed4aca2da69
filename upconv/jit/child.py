"""The build itself, run as a script in a process of its own.

A process of its own because it loads what it built: a library that crashes when it is loaded takes
only this process with it. It is run by path and imports torch only, so that a build does not depend
on the package that asks for it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

STARTED, DONE = "started", "done"
"""Files beside the request: this script runs; the library is built, and can be loaded."""


def kill_session(leader: int) -> None:
    """Kill every process of a session, its leader last.

    A whole session and not a process group, because ninja gives each compiler a group of its own.
    Looked for until none is left: a compiler may start another while we look.
    """
    while True:
        members = [pid for pid in _processes() if pid != leader and _session(pid) == leader]
        if not members:
            break
        for pid in members:
            _kill(pid)
        time.sleep(0.01)
    _kill(leader)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session(pid: int) -> int:
    """The session of a process that is alive, else 0."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
    except OSError:
        return 0
    return 0 if state in (b"Z", b"X") else int(session)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def die_with_parent(stdin: int) -> None:
    """End this process and all its compilers when the other end of stdin goes away.

    That is how a `kill -9` of the parent ends the compilers too: they would go on writing into a
    folder that the next process is clearing.
    """
    while os.read(stdin, 64):
        pass
    kill_session(os.getpid())


def note(folder: str, name: str) -> None:
    """An empty file, for the parent: STARTED or DONE."""
    with open(os.path.join(folder, name), "wb"):
        pass


def main() -> None:
    folder = os.path.dirname(sys.argv[1])
    note(folder, STARTED)
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    if hasattr(signal, "SIGCHLD"):
        # Inherited where the parent ignores it: ninja could not wait for its compilers then.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdin = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    threading.Thread(target=die_with_parent, args=(stdin,), daemon=True).start()

    compilers = subprocess.Popen(request["ninja"], cwd=request["folder"])
    try:
        sys.path[:] = request["sys_path"]
        import torch  # meanwhile: that takes seconds
    finally:
        code = compilers.wait()
    if code:
        sys.exit(1)
    torch.ops.load_library(request["library"])  # type: ignore[no-untyped-call]
    note(folder, DONE)


if __name__ == "__main__":
    main()
