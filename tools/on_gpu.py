"""What a change of a GPU kernel has to pass on a GPU, and what is to be measured of it.

    python -m tools.on_gpu check OUT           all tests, compute-sanitizer's memcheck and racecheck
    python -m tools.on_gpu trial OUT           every tiling of the forms that are on trial
    python -m tools.on_gpu tables OUT          forward and gradients of all cases, beside PyTorch's
    python -m tools.on_gpu compare OUT PATCH   tests and times of this tree with a patch and without

For a GPU that is not at hand for long: no step outlasts --seconds, and what a stopped step has
measured by then is kept. Each writes OUT/NAME.log; a table at the end says how each one ended, and
the exit code is 1 if one failed or was stopped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.sanitize import SWEEPS

ROOT = Path(__file__).resolve().parent.parent
BENCH = ("-m", "upconv", "bench", "--device", "cuda", "--seconds", "0.04")
PYTEST = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
DENSE = ("kb69", "kb65", "kb57", "kb71", "kb78", "kb61_3d", "kb64_1d", "kb79_1d")
"""Cases of the Hopper kernel for all layers and of that which walks, for `compare`."""
MMA_TRIALS = (
    *("kb75:tf32", "kb81:tf32", "kb77_3d:bfloat16", "kb75:bfloat16"),
    *("kb75:bfloat16:grad_input", "kb58_3d:bfloat16:grad_input"),
)
"""Layers that mostly wait whose forms of 32 pixels a warp have not been measured, or few (of
kb75 in BF16), and the input's gradient, which is on trial."""


@dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]
    folder: Path = ROOT


@dataclass(frozen=True)
class Outcome:
    step: Step
    code: int | None
    """None: stopped."""
    seconds: float
    last: str
    """Line of its output."""

    @property
    def words(self) -> str:
        return {0: "passed", None: "stopped"}.get(self.code, f"failed ({self.code})")


def python(name: str, *arguments: str, folder: Path = ROOT) -> Step:
    return Step(name, (sys.executable, *arguments), folder)


def sanitizer(tool: str, sweep: str) -> Step:
    head = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", sys.executable)
    return Step(f"{tool}-{sweep}", (*head, "-m", "tools.sanitize", sweep))


def bench(name: str, out: Path, *options: str, folder: Path = ROOT) -> Step:
    target = str(out / f"{name}.json")
    return python(name, *BENCH, *options, "--out", target, folder=folder)


def check(out: Path) -> Iterator[list[Step]]:
    tests = python("tests", *PYTEST, "-n", "8", f"--build-cache={cache()}")
    sanitizers = [sanitizer(tool, sweep) for tool in ("racecheck", "memcheck") for sweep in SWEEPS]
    yield [tests, *sanitizers]


def trial(out: Path) -> Iterator[list[Step]]:
    yield [python("mma", "benchmarks/measure_mma.py", str(out / "mma.jsonl"), *MMA_TRIALS)]


def tables(out: Path) -> Iterator[list[Step]]:
    for direction in ("forward", "backward"):
        for dtype in ("tf32", "bfloat16"):
            options = ("--direction", direction, "--dtype", dtype, "--against", "default,benchmark")
            yield [bench(f"{direction}-{dtype}", out, "*", *options)]


def copy_patched(patch: Path, other: Path) -> None:
    shutil.copytree(ROOT, other, ignore=shutil.ignore_patterns(".venv", ".git", "*_cache"))
    command = ["git", "apply", str(patch.resolve())]
    run = subprocess.run(command, cwd=other, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{patch} does not fit this tree: {run.stderr.strip()}")


def compare(out: Path, other: Path) -> Iterator[list[Step]]:
    """`other`: the patched copy."""
    dense = ("test_cuda.py", "test_cuda_backward.py", "test_export_gpu.py")
    cases = (*DENSE, "--dtype", "tf32,bfloat16")
    yield [python("patched-build", "-m", "upconv", "build", folder=other)]
    yield [
        python("patched-tests", *PYTEST, "-n", "8", *(f"tests/{f}" for f in dense), folder=other)
    ]
    yield [bench("before", out, *cases)]
    yield [bench("patched", out, *cases, "--compare", str(out / "before.json"), folder=other)]
    yield [bench("before-again", out, *cases, "--compare", str(out / "before.json"))]


def cache() -> Path:
    return Path(tempfile.gettempdir()) / "upconv-on-gpu"


def run(step: Step, out: Path, deadline: float) -> Outcome:
    begin = time.monotonic()
    environment = os.environ | {"UPCONV_CACHE_DIR": str(cache()), "PYTHONUNBUFFERED": "1"}
    path = out / f"{step.name}.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            step.command,
            cwd=step.folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(max(deadline - begin, 0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(step, code, time.monotonic() - begin, lines[-1].strip() if lines else "")


def run_all(stages: Sequence[Sequence[Step]], out: Path, seconds: float) -> list[Outcome]:
    """One stage after the other, each with an even share of the time that is left; the steps of a
    stage side by side."""
    outcomes: list[Outcome] = []
    end = time.monotonic() + seconds
    for index, stage in enumerate(stages):
        now = time.monotonic()
        deadline = now + (end - now) / (len(stages) - index)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(partial(run, out=out, deadline=deadline), stage))
        for outcome in found:
            print(f"{outcome.words:12} {outcome.seconds:6.1f} s  {outcome.step.name}", flush=True)
        outcomes += found
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.on_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["check", "trial", "tables", "compare"])
    parser.add_argument("out", type=Path, help="folder for logs and measurements")
    parser.add_argument("patch", type=Path, nargs="?", help="of `compare`, as git diff writes it")
    parser.add_argument("--seconds", type=float, default=540, help="for all steps (default: 540)")
    given = parser.parse_args(arguments)
    if (given.what == "compare") != (given.patch is not None):
        parser.error("`compare` wants a patch, nothing else does")
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    stages = [[python("doctor", "-m", "upconv", "doctor", "--json")]]
    stages += [[python("build", "-m", "upconv", "build")]]
    with tempfile.TemporaryDirectory(prefix="upconv-patched-") as folder:
        if given.what == "compare":
            copy_patched(given.patch, Path(folder) / "upconv")
            stages += compare(out, Path(folder) / "upconv")
        else:
            stages += {"check": check, "trial": trial, "tables": tables}[given.what](out)
        outcomes = run_all(stages, out, given.seconds)
    print()
    for outcome in outcomes:
        if outcome.code != 0 or len(outcomes) < 12:
            print(f"{outcome.step.name}: {outcome.words}: {outcome.last[:200]}")
    return int(any(outcome.code != 0 for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
