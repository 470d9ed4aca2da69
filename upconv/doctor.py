"""`upconv doctor`: what this machine has, what will run on it and why, and whether it is right.

Every probe stands alone: one that fails is reported as such, and the rest of the report is there.
That matters most where torch itself cannot be imported, so nothing here imports it at the top.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from . import libraries

Report = dict[str, dict[str, Any]]

SELF_TEST: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("stride 1", (2, 16, 24, (13, 17), (3, 5))),
    ("stride 2, padding", (2, 24, 16, (9, 11), 4, 2, 1)),
    ("dilation, output padding", (1, 8, 8, (7, 8), 3, (2, 3), 1, (1, 2), 2)),
    ("groups", (2, 12, 18, (6, 7), 3, 2, 1, 0, 1, 6)),
    ("1-D", (2, 16, 16, (65,), 16, 8, 4)),
    ("3-D", (1, 8, 12, (5, 6, 7), 3, 2, 1)),
)
"""Problems of the self-test: name, and the arguments of `Problem.of`."""


def guarded(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The probe's answer, or what stopped it."""
    try:
        return probe()
    except Exception as error:  # whatever is wrong with the machine is what is to be reported
        text = str(error).strip().splitlines()
        return {"error": f"{type(error).__name__}: {text[0] if text else 'no message'}"}


def examine(self_test: bool = True) -> Report:
    """All probes in the order they are printed."""
    probes = {
        "versions": versions,
        "cpu": cpu,
        "gpu": gpu,
        "tools": tools,
        "variables": variables,
    }
    if self_test:
        # Before the state of libraries and cache is asked for: it is what builds the former.
        probes |= {"self-test": run_self_test, "kernels": kernels}
    else:
        probes |= {"kernels": expected_kernels}
    return {name: guarded(probe) for name, probe in (probes | {"cache": cache}).items()}


def failures(report: Report) -> list[str]:
    """What makes the report a bad one.

    Calls work without a compiler as well, but none gets faster, which is what upconv is there for.
    A missing GPU is no failure, and neither is UPCONV_BACKEND=aten.
    """
    found = [
        f"{name}: {section['error']}" for name, section in report.items() if "error" in section
    ]
    found += [
        f"variables: {variable['error']}"
        for variable in report.get("variables", {}).values()
        if isinstance(variable, dict) and variable["error"]
    ]
    found += [
        f"{section}: {name}: {row['problem']}"
        for section in ("self-test", "kernels")
        for name, row in report.get(section, {}).items()
        if isinstance(row, dict) and row["problem"]
    ]
    return found


def versions() -> dict[str, Any]:
    from .version import __version__

    found = {"upconv": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    for package in ("torch", "triton", "ninja", "rich", "matplotlib"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    with suppress(Exception):  # a broken installation is told of elsewhere
        import torch

        found["torch"] = torch.__version__  # the package's leaves out the CUDA it was built for
    found["system"] = platform.platform()
    return found


def cpu() -> dict[str, Any]:
    found: dict[str, Any] = {"name": cpu_name(), "cores": os.cpu_count()}
    if hasattr(os, "sched_getaffinity"):
        found["cores this process may use"] = len(os.sched_getaffinity(0))
    import torch

    from .explain import this_hardware

    found["threads of torch"] = torch.get_num_threads()
    found["instruction set in use"] = this_hardware("cpu").isa
    return found


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpu() -> dict[str, Any]:
    import torch

    from .explain import tf32_allowed

    found: dict[str, Any] = {"cuda of torch": torch.version.cuda or "none: a CPU build of PyTorch"}
    if not torch.cuda.is_available():
        return found | {"found": "none that torch can use"}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found[f"gpu {index}"] = (
            f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB"
        )
    found["tf32 for convolutions"] = tf32_allowed()
    return found


def tools() -> dict[str, Any]:
    from .jit.tools import compiler_version, find_ninja, find_toolchain

    found: dict[str, Any] = {"nvcc": shutil.which("nvcc") or "not found"}
    try:
        found["ninja"] = find_ninja() or "not found"
        from .jit import spec

        toolchain = find_toolchain(spec("cpu"))
        compiler = toolchain.cxx
        found["c++"] = f"{compiler} ({compiler_version(compiler)})" if compiler else "not found"
    except ImportError:
        found["c++"] = shutil.which("c++") or shutil.which("g++") or "not found"
    return found


def variables() -> dict[str, Any]:
    from . import env

    return {
        variable.name: {"value": variable.value, "set": variable.is_set} | {"error": variable.error}
        for variable in env.variables()
    }


def cache() -> dict[str, Any]:
    from .jit import cache_state

    return cache_report(cache_state())


def cache_report(state: Any) -> dict[str, Any]:
    """A `CacheState` in plain values, the folder that stands in for it included."""
    found: dict[str, Any] = {
        "folder": str(state.folder),
        "named by": state.source,
        "writable": state.writable,
        "trusted": state.trusted if state.exists else "not made yet",
        "builds": {
            entry.name: {
                "bytes": entry.size,
                "age_s": round(entry.age_s),
                "problem": entry.problem,
            }
            for entry in state.entries
        },
    }
    if state.problem:
        found["problem"] = state.problem
    if state.temporary:
        found["unfinished builds"] = [str(path) for path in state.temporary]
    if state.logs:
        found["logs of failed builds"] = [str(path) for path in state.logs]
    if state.lock_holder:
        found["locked by"] = state.lock_holder
    if state.fallback is not None:
        found["fallback"] = cache_report(state.fallback)
    return found


def devices() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def kinds() -> list[str]:
    """The libraries of use here."""
    return [kind for device in devices() for kind in libraries.of_device(device)]


SERVED_BY = {
    "cpu": "calls on the CPU",
    "cuda": "calls on the GPU",
    "cuda_wgrad": "gradients of weights on the GPU",
    "cuda_fp16": "calls in FP16 on the GPU's tensor cores",
    "cuda_strict": "calls in strict float32 on the GPU's tensor cores",
}
"""What each library is for."""


def kernels() -> dict[str, Any]:
    """Which compiled libraries are loaded, and why not."""
    from .jit import load

    found = {}
    for kind in kinds():
        result = load(kind)
        how = f"built in {result.seconds:.1f} s" if result.built else "from the cache"
        found[kind] = _library(kind, f"{result.path}, {how}", result.reason)
    return found


def expected_kernels() -> dict[str, Any]:
    """The same without building: what stands in the way, if anything."""
    from .jit import obstacle

    return {kind: _library(kind, "nothing is in the way", obstacle(kind)) for kind in kinds()}


def _library(kind: str, how: str, reason: str) -> dict[str, Any]:
    """One row of the section; `problem` where there is something that the user should mend."""
    text = f"upconv's kernels where they win ({how})"
    if reason:
        text = f"{SERVED_BY[kind]} run on PyTorch's operator: {reason}"
    problem = text if reason and _to_mend(kind) else ""
    return {"available": not reason, "text": text, "problem": problem}


def _to_mend(kind: str) -> bool:
    """Would the library be of use here? Not by choice, nor where no kernel of ours would serve."""
    from . import env
    from .planner.plan import PROVEN

    if env.settings().backend == "aten" or sys.platform != "linux":
        return False
    if kind == "cpu" or env.settings().force_kernel:
        return True
    import torch

    proven = {capability for capabilities in PROVEN.values() for capability in capabilities}
    gpus = range(torch.cuda.device_count())
    return any(torch.cuda.get_device_capability(gpu) in proven for gpu in gpus)


def run_self_test() -> dict[str, Any]:
    """Every self-test problem on every device: the operator against float64."""
    import torch

    from . import accuracy
    from .planner import Problem

    found = {}
    for device in devices():
        for name, arguments in SELF_TEST:
            for dtype in ("float32", "bfloat16"):
                problem = Problem.of(*arguments, dtype=dtype, tf32=device == "cuda")
                inputs = accuracy.make_inputs(problem, device)
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the section on kernels says the same
                    result = inputs.run(accuracy.upconv_operator(problem.ndim))
                (error,) = accuracy.errors(inputs, problem, [result])
                bound = accuracy.limit(problem)
                text = "" if error <= bound else f"error {error:.1e} is above {bound:.1e}"
                found[f"{device}, {name}, {dtype}"] = {"error of result": error, "problem": text}
    return found


TITLES = {"variables": "UPCONV_* variables", "kernels": "what will run"}


def render(report: Report) -> str:
    """The report for people."""
    blocks = [render_section(name, section) for name, section in report.items()]
    return "\n\n".join([*blocks, verdict(report)])


def verdict(report: Report) -> str:
    """The last lines: fine or not, and by whom."""
    bad = failures(report)
    rows = [row for row in report.get("kernels", {}).values() if isinstance(row, dict)]
    by_pytorch = [row["text"] for row in rows if not row["available"]]
    if bad:
        return "\n  ".join(["something is wrong:", *bad])
    if by_pytorch:
        return "\n  ".join(["nothing is wrong, but upconv's kernels do not serve:", *by_pytorch])
    return "all is well"


def render_section(name: str, section: dict[str, Any]) -> str:
    tested = name == "self-test" and "error" not in section
    lines = _self_test_lines(section) if tested else _lines(section, "  ")
    return "\n".join([TITLES.get(name, name), *lines])


def _lines(section: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in section.items():
        if name == "builds":
            lines += [f"{indent}build {entry}: {_build(state)}" for entry, state in value.items()]
        elif isinstance(value, dict) and "set" in value:
            lines.append(f"{indent}{name} = {_variable(value)}")
        elif isinstance(value, dict) and "text" in value:
            lines.append(f"{indent}{name}: {value['text']}")
        elif isinstance(value, dict):
            lines += [f"{indent}{name}", *_lines(value, indent + "  ")]
        elif isinstance(value, list):
            lines += [f"{indent}{name}: {item}" for item in value]
        else:
            lines.append(f"{indent}{name}: {value}")
    return lines


def _variable(value: dict[str, Any]) -> str:
    if value["error"]:
        return f"WRONG: {value['error']}"
    return f"{value['value'] or '(nothing)'}{'' if value['set'] else '  (default)'}"


def _build(state: dict[str, Any]) -> str:
    text = f"{state['bytes'] / 1e6:.1f} MB, {state['age_s'] / 3600:.1f} hours old"
    return f"{text}, NOT USABLE: {state['problem']}" if state["problem"] else text


def _self_test_lines(section: dict[str, Any]) -> list[str]:
    bad = {name: row["problem"] for name, row in section.items() if row["problem"]}
    worst = max((row["error of result"] for row in section.values()), default=0.0)
    if not bad:
        return [f"  {len(section)} problems agree with float64, largest error {worst:.1e}"]
    return [f"  {len(bad)} of {len(section)} problems are wrong"] + [
        f"  {name}: {text}" for name, text in bad.items()
    ]
