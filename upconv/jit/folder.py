"""Where builds are kept: which folder, whether it can be trusted, and its lock.

A library is code that runs as us, so nothing is loaded from a folder, entry or file that somebody
else could have written: the owner must be us or root, and nobody else may write. (Another user who
can rename a folder above ours can put his own in its place, but cannot make it ours.)

The lock is flock(2) on one file per folder. The kernel drops it when its holder dies, however it
dies, so there is no such thing as a stale lock, and whoever holds it knows that every temporary
folder of this machine was left by a process that is gone. Where the file system has no locks,
builds go ahead without: they happen in private folders and end in an atomic rename, so the worst
that happens is the same work twice.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import env

LOCK_FILE = "lock"
TEMPORARY = "upconv-tmp-"
"""How the names of temporary folders begin. A user may point the cache at a folder that holds other
things too, so whatever is removed has a name that nobody else would choose."""
LOCK_LIMIT_S = 1800.0
"""Longest wait for another process: more than any build takes."""
_POLL_S = 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class FolderUnusable(RuntimeError):
    """Nothing can be kept in this folder; the text says why and what to do."""


def usual_folder() -> tuple[Path | None, str]:
    """The user's cache folder and where its name comes from; None: the user has no home."""
    asked = env.settings().cache_dir
    if asked:
        return Path(asked), "UPCONV_CACHE_DIR"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg, "upconv"), "XDG_CACHE_HOME"
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        return Path(home, ".cache", "upconv"), "home"
    return None, "no home folder"


def fallback_folder() -> Path:
    """A private folder below the temporary one, the same for every process of this user."""
    parent, name = Path(os.environ.get("TMPDIR") or "/tmp"), f"upconv-{os.geteuid()}"
    if not os.path.lexists(parent / name):
        return parent / name
    # Anybody can take the plain name in a shared folder; then there is one with a random ending.
    for folder in [parent / name, *sorted(parent.glob(f"{name}-*"))]:
        if not trust_problem(folder):
            return folder
    try:
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    except OSError:
        return parent / name


def trust_problem(path: Path) -> str:
    """Why we would not run code from this path; empty when we would. The path must exist."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        return f"{path} can be written to by other users (mode {mode:04o}; chmod go-w it)"
    return ""


def real_folder(folder: Path) -> Path:
    """The folder itself: a link in the user's own configuration is followed once, here."""
    return Path(os.path.realpath(folder))


def prepare(folder: Path, private: bool) -> None:
    """Make the folder if need be, and see that it can be trusted."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            # Others may read an ordinary cache: root can build for all users of a machine.
            folder.mkdir(mode=0o700 if private else 0o755)
        problem = trust_problem(folder)
        if not problem and not os.path.isdir(folder):
            problem = f"{folder} is not a folder"
    except OSError as error:
        raise FolderUnusable(f"{folder} cannot be made ({error.strerror})") from error
    if problem:
        raise FolderUnusable(problem)


_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _drop_inherited_locks() -> None:
    # A forked child shares its parent's lock: were the parent killed, the child would keep it.
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited_locks)


@contextlib.contextmanager
def locked(
    folder: Path, on_wait: Callable[[], None], limit_s: float = LOCK_LIMIT_S
) -> Iterator[bool]:
    """Hold the folder's lock; yields False where the file system has none to give."""
    try:
        descriptor = os.open(
            folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError as error:
        raise FolderUnusable(f"{folder} cannot be written to ({error.strerror})") from error
    _held.add(descriptor)
    try:
        has_lock = _acquire(descriptor, folder, on_wait, limit_s)
        if has_lock:
            _sign(descriptor)
        yield has_lock
    finally:
        _held.discard(descriptor)
        _release(descriptor)


def lock_holder(folder: Path) -> str:
    """Who holds the folder's lock now; empty when nobody does."""
    import fcntl

    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_signature(descriptor)
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return ""


def _acquire(descriptor: int, folder: Path, on_wait: Callable[[], None], limit_s: float) -> bool:
    import fcntl

    started = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise FolderUnusable(f"{folder} cannot be locked ({error.strerror})") from error
        if time.monotonic() - started > limit_s:
            raise FolderUnusable(
                f"{folder} has been locked for {limit_s:.0f} s by {_read_signature(descriptor)}"
            )
        on_wait()
        time.sleep(_POLL_S)


def _release(descriptor: int) -> None:
    import fcntl

    # Unlock before closing: a child forked meanwhile may still hold the same open file.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _sign(descriptor: int) -> None:
    # For people and for `upconv doctor` only; on a full disk the lock works without a signature.
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)


def _read_signature(descriptor: int) -> str:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        age = time.time() - float(record["since"])
        return f"process {record['pid']} on {record['host']} for {age:.0f} s"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown process"
