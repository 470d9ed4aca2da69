"""What ptxas says of a file of Hopper kernels."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from params_header import CUDA


def spilled_bytes(source: Path, folder: Path) -> list[int]:
    """Of each kernel of a file. Fails where products are serialized or nothing is compiled."""
    target = "-gencode=arch=compute_90a,code=sm_90a"
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-I{CUDA}", "-Xptxas=-v", "-cubin"]
    command = ["nvcc", target, *flags, "-o", str(folder / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert "serialized" not in report, "the WGMMA pipeline is broken up"
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    assert spills, report
    return spills
