"""What the tests of the build cache share: tiny libraries, compilers that tell, fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from upconv.jit import UpconvWarning
from upconv.jit.recipe import BuildSpec

ROOT = Path(__file__).resolve().parent.parent

TINY = '#include "tiny.h"\nextern "C" int upconv_answer() { return ANSWER; }\n'

# Obtains the tiny library and prints the result as one line of JSON, in as many processes as asked
# for. These are forked before anything else happens, because importing torch takes two seconds.
DRIVER = """
import json, os, sys
sys.path[:0] = {path!r}
import torch
from jit_helpers import tiny_spec
from pathlib import Path
from upconv.jit.loader import obtain
for _ in range(int(sys.argv[2]) - 1):
    if os.fork() == 0:
        break
result = obtain(tiny_spec(Path(sys.argv[1])))
answer = dict(ok=result.ok, built=result.built, path=str(result.path), reason=result.reason,
              notes=result.notes, build_machinery="torch.utils.cpp_extension" in sys.modules)
os.write(1, json.dumps(answer).encode() + b"\\n")
"""


def tiny_spec(sources: Path) -> BuildSpec:
    """A library of one function; compiles in a fraction of a second."""
    files = (sources / "tiny.cpp", sources / "tiny.h")
    return BuildSpec("tiny", files[:1], files, cflags=("-O1",), ldflags=())


def write_tiny(sources: Path, answer: str = "42") -> Path:
    sources.mkdir(exist_ok=True)
    (sources / "tiny.cpp").write_text(TINY)
    (sources / "tiny.h").write_text(f"#define ANSWER {answer}\n")
    return sources


def write_compiler(folder: Path, before: str = "", name: str = "c++") -> Path:
    """The real compiler behind a script that runs `before`, and a line in a log, per compilation.

    The log is `<folder>/compiled`; the script's process id is in it.
    """
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" -c "*) echo $$ >> {folder}/compiled; {before or ":"};; esac\n'
        'exec /usr/bin/c++ "$@"\n'
    )
    script.chmod(0o755)
    return script


def compilations(folder: Path) -> list[int]:
    """Process ids of the compilations that a `write_compiler` script has seen."""
    try:
        return [int(line) for line in (folder / "compiled").read_text().split()]
    except FileNotFoundError:
        return []


def start(
    sources: Path,
    cache: Path,
    count: int = 1,
    flags: tuple[str, ...] = (),
    before: Callable[[], object] | None = None,
    **variables: str,
) -> subprocess.Popen[str]:
    """A fresh process, or `count` of them, that obtains the tiny library.

    `flags` are Python's; `before` is run in the process before that.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UPCONV_")}
    environment.update({"UPCONV_CACHE_DIR": str(cache), **variables})
    script = DRIVER.format(path=[str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, *flags, "-c", script, str(sources), str(count)],
        preexec_fn=before,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_all(process: subprocess.Popen[str]) -> list[dict[str, object]]:
    """What the processes of `start` printed; fails when the first of them did not end well."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


def finish(process: subprocess.Popen[str]) -> dict[str, object]:
    (answer,) = finish_all(process)
    return answer


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob("upconv-tmp-*"))


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("tiny-*"))


def warnings_of(call: Callable[[], object]) -> list[str]:
    """The texts of upconv's warnings during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, UpconvWarning)]
