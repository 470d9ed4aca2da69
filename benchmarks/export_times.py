"""Times the exported files of examples/kernelbench on a GPU, beside the library and PyTorch.

    python benchmarks/export_times.py [-o RESULTS.json]

Each file is built anew in an empty folder, and the build is timed. Then, on the input of its task
and with the same weights: the exported model, `upconv.accelerate` of the reference, and the
reference itself with PyTorch's default and with cudnn.benchmark; medians of calls that take turns.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import upconv
from upconv.contenders import Call, Contender, searched
from upconv.stopwatch import timed

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "kernelbench"
CASES = ("kb57", "kb65", "kb69")
TOLERANCE = 1e-4
"""Absolute and relative, of the exported model against PyTorch's with TF32."""


def definitions(path: Path) -> dict[str, Any]:
    context: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), context)
    return context


def forward_of(model: nn.Module, x: Tensor) -> Call:
    def call() -> tuple[Tensor]:
        with torch.no_grad():
            return (model(x),)

    return call


def wrong_elements(y: Tensor, expected: Tensor) -> int:
    bound = TOLERANCE + TOLERANCE * expected.abs()
    return int(((y - expected).abs() > bound).sum())


def measured(case: str, seconds: float) -> dict[str, Any]:
    """One row: seconds of the cold build, milliseconds of everyone, and how many outputs differ."""
    task = definitions(EXAMPLES / f"{case}_reference.py")
    start = time.perf_counter()
    exported = definitions(EXAMPLES / f"{case}.py")["ModelNew"]
    built = time.perf_counter() - start
    models = []
    for model in (task["Model"], exported):
        torch.manual_seed(0)
        models.append(model(*task["get_init_inputs"]()).cuda())
    reference, ours = models
    (x,) = (x.cuda() for x in task["get_inputs"]())
    library = copy.deepcopy(reference)
    report = upconv.accelerate(library)
    assert report.swapped, str(report)
    calls = {
        "exported": forward_of(ours, x),
        "library": forward_of(library, x),
        "default": forward_of(reference, x),
        "benchmark": searched(forward_of(reference, x)),
    }
    # PyTorch keeps the algorithms that it chose in one table per thread.
    own_thread = {"benchmark": ThreadPoolExecutor(1)}
    wrong = wrong_elements(calls["exported"]()[0], calls["default"]()[0])
    contenders = {name: Contender(call, own_thread.get(name)) for name, call in calls.items()}
    times = {name: timing.median for name, timing in timed(contenders, seconds, "cuda").items()}
    return {"case": case, "build_seconds": built, "wrong": wrong, "milliseconds": times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--seconds", type=float, default=0.3, help="for the timed calls of a case")
    parser.add_argument("--commit", default="", help="what is measured")
    arguments = parser.parse_args()
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCH_EXTENSIONS_DIR"] = folder
        for case in CASES:
            row = measured(case, arguments.seconds)
            rows.append(row)
            each = "  ".join(f"{name} {ms:.3f}" for name, ms in row["milliseconds"].items())
            print(
                f"{case}: built in {row['build_seconds']:.1f} s, {row['wrong']} wrong; ms: {each}"
            )
    if arguments.out:
        result = {
            "date": datetime.date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": arguments.commit,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
