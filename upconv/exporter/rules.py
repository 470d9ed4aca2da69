"""What an exported file must not hold, so that KernelBench's harness takes it.

The harness runs the file in the namespace of the reference, with neither `__name__` nor `__file__`
and possibly two lines before it; it may run it twice, and once on a machine without a GPU, to build
the kernel. Before that, it searches the text: each line is cut at the first `#` or `//`, and what
is left, docstrings and C++ included, must not hold certain words. `violations` states these rules
once; the exporter applies them to everything it writes.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from .errors import ExportError

ALLOWED_NAMES = {"ModelNew", "torch"}
"""Top-level names without a leading underscore."""

_OPERATORS = (
    r"conv\w*|\w*pool\dd|\w*_norm|normalize|b?mm|matmul|einsum|linear|\w*_loss|kl_div|cross_entropy"
    r"|\w*relu|[rs]?elu|celu|gelu|silu|mish|\w*tanh|\w*sigmoid|soft\w+|log_softmax|logsumexp|clamp"
    r"|dropout|cosine_similarity"
)

FORBIDDEN = {
    r"\btry\s*:": "looks like a fallback",
    r"\bexcept\s*(?::|\s\w)": "looks like a fallback",
    r"\bpass\b": "looks like an empty class, even as a variable of the kernel",
    r"\bthreading\b|\bmultiprocessing\b": "looks like work on the side",
    r"concurrent\.futures|(?:Thread|Process)PoolExecutor": "looks like work on the side",
    r"_make_subclass|class\s+\w+.*\((?:torch\.)?Tensor\)|torch\.Tensor\.__new__": (
        "looks like a tensor that computes later"
    ),
    r"(?:torch\.cuda\.(?:Event|synchronize)|time\.(?:perf_counter|time))(?:\.\w+)?\s*=[^=]": (
        "replaces what measures time"
    ),
    r"torch\.nn\.(?!(?:Module|Parameter)(?:List|Dict)?\b|init\b)": "looks like PyTorch's own layer",
    r"nn\.functional\b|\bF\.\w+\s*\(": "looks like PyTorch's own function",
    rf"\btorch\.(?:{_OPERATORS})\s*\(": "looks like PyTorch's own function",
    r"cuda\.Stream\s*\(|with\s+torch\.cuda\.stream|\.(?:wait|record)_stream\s*\(": (
        "looks like work on another stream"
    ),
    r"torch\.library|TORCH_LIBRARY": "fails when the file is loaded twice",
    r"\b__name__\b|\b__file__\b": "does not exist there",
}
HALF_CASTS = (
    r"__float2half(?:_rn)?\s*\(|\(\s*__half\s*\)\s*[\w>.-]|static_cast\s*<\s*(?:__)?half\s*>"
    r"|\.half\s*\(|\.float16\s*\(|\.to\s*\(\s*(?:dtype\s*=\s*)?torch\.(?:float16|half)\b"
)
"""In a float32 file these look like a hidden loss of precision."""

CUDA_WORDS = {r"\bpass\b": "lap", r"\bexcept(?=\s+\w)": "other than"}
PYTHON_WORDS = {r"\bpass\b": "computation", r"\bexcept(?=\s+\w)": "other than"}
"""What our sources say and the harness would misread, and what an exported file says instead. In
CUDA `pass` is a variable; in the planner, where `try` is refused, both are prose."""


def reworded(text: str, words: dict[str, str]) -> str:
    """The text with other words. A new word must not be in use: it may be a variable's name."""
    for word, instead in words.items():
        if words is CUDA_WORDS and re.search(word, text) and re.search(rf"\b{instead}\b", text):
            raise ExportError(f"the CUDA sources hold both {word!r} and {instead!r}; rename one")
        text = re.sub(word, instead, text)
    return text


def violations(text: str, dtype: str) -> list[str]:
    """What is wrong with an exported file, in words; nothing if all is well."""
    return [*_structure(ast.parse(text)), *_words(text, dtype)]


def _words(text: str, dtype: str) -> Iterator[str]:
    lines = [line.split("#")[0].split("//")[0] for line in text.split("\n")]
    rules = FORBIDDEN | ({HALF_CASTS: "loses precision"} if dtype == "float32" else {})
    for pattern, why in rules.items():
        if found := re.search(pattern, "\n".join(lines)):
            number = "\n".join(lines)[: found.start()].count("\n") + 1
            yield f"line {number}: {found[0]!r} {why}"
    code = "\n".join(lines)
    for needed in ("__global__", "load_inline"):
        if needed not in code:
            yield f"{needed} does not occur outside comments"


def _structure(tree: ast.Module) -> Iterator[str]:
    for name, number in _top_level_names(tree):
        if not name.startswith("_") and name not in ALLOWED_NAMES:
            yield f"line {number}: the top-level name {name} could replace one of the harness's"
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    if "ModelNew" not in classes:
        yield "there is no class ModelNew"
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Global)):
            continue
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""] if node.level == 0 else ["."]
        else:
            yield f"line {node.lineno}: a global statement"
        for module in modules:
            root = module.split(".")[0]
            if root == "__future__":
                yield f"line {node.lineno}: a future import is an error below other lines"
            elif root != "torch" and root not in sys.stdlib_module_names:
                yield f"line {node.lineno}: imports {module}, which is neither torch nor standard"


def _top_level_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield (alias.asname or alias.name).split(".")[0], node.lineno
        else:
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id, part.lineno
