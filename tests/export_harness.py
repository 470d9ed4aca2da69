"""What the exporter's tests share: running an exported file as KernelBench's harness does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "kernelbench"
CASES = ("kb57", "kb65", "kb69")


def load(text: str, context: dict[str, Any] | None = None) -> dict[str, Any]:
    """Runs an exported file: lines before it, no __name__, in a namespace that may be shared."""
    context = {} if context is None else context
    exec(compile("import os\nos.environ['SEEN'] = '1'\n" + text, "<string>", "exec"), context)
    return context


def load_case(name: str) -> dict[str, Any]:
    """The reference and then the exported file, in one namespace."""
    context: dict[str, Any] = {}
    exec((EXAMPLES / f"{name}_reference.py").read_text(), context)
    return load((EXAMPLES / f"{name}.py").read_text(), context)


def seeded(model: Any, arguments: list[Any], seed: int = 42) -> Any:
    """A model made as the harness makes it: on the CPU, in float32, after the seed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return model(*arguments)
