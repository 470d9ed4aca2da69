"""The exporter's bundlers: CUDA files and planner modules as one text, or a loud refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from upconv.exporter import ExportError, cuda_source, python_source, rules
from upconv.exporter.families import FAMILIES


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# --- CUDA ----------------------------------------------------------------------------------------


def test_each_file_once_in_the_order_of_use(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "a/one.cu": '// One.\n#include "two.h"\n#include "b/three.h"\n#include <cstdint>\n'
            "int one;\n",
            "a/two.h": '#pragma once\n#include "b/three.h"\n\n#define TWO "#include"\nint two;\n',
            "b/three.h": "// Three.\n#pragma once\n#include <cmath>\n#if 1\nint three;\n#endif\n",
        },
    )
    text = cuda_source.bundle(["a/one.cu"], root)
    assert re.findall(r"int \w+;|#include <\w+>|===== \S+", text) == [
        "#include <cmath>",
        "#include <cstdint>",
        "===== csrc/b/three.h",
        "int three;",
        "===== csrc/a/two.h",
        "int two;",
        "===== csrc/a/one.cu",
        "int one;",
    ]
    assert "// Three." in text
    assert "// One." in text
    assert "#pragma" not in text
    assert '#include "' not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('#include "none.h"\n', 'one.cu:1: #include "none.h" names no file'),
        ('#if A\n#include "two.h"\n#endif\n', "one.cu:2: an #include inside #if"),
        ('int x;\n#include "two.h"\n', "one.cu:2: an #include after code"),
        ("#include MACRO\n", "one.cu:1: cannot inline '#include MACRO'"),
        ('#include "loop.h"\n', "includes itself"),
    ],
)
def test_what_cannot_be_inlined_is_an_error(text: str, words: str, tmp_path: Path) -> None:
    root = write(tmp_path, {"one.cu": text, "two.h": "", "loop.h": '#include "loop.h"\n'})
    with pytest.raises(ExportError, match=words):
        cuda_source.bundle(["one.cu"], root)
    with pytest.raises(ExportError, match=r"gone.cu does not exist"):
        cuda_source.bundle(["gone.cu"], root)


def test_types_that_are_not_needed_go() -> None:
    text = """\
struct Kept {
  int a;
};
struct Gone {
  struct Inner {
  };
};

template <>
struct Trait<Gone, 64> {
  void run() { asm("{"
                   "}"); }
};
template <>
__device__ inline float
convert<Gone>(float v) {
  return v;
}
template <>
struct Trait<Kept, 64> {
  int same = is<Gone>;
};
struct Gone2 {
};
"""
    left = cuda_source.without_types(text, ["Gone"])
    assert re.findall(r"^(?:struct|float|convert).*", left, re.M) == [
        "struct Kept {",
        "struct Trait<Kept, 64> {",
        "struct Gone2 {",
    ]
    assert left.count("{") == left.count("}")
    assert cuda_source.without_types(text, []) == text
    with pytest.raises(ExportError, match="has no end"):
        cuda_source.without_types("struct Gone {\n", ["Gone"])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.kernel)
def test_every_family_and_dtype_can_be_bundled(family: object) -> None:
    assert family in FAMILIES
    for dtype, operand in family.operands.items():  # type: ignore[attr-defined]
        text = rules.reworded(family.source(dtype), rules.CUDA_WORDS)  # type: ignore[attr-defined]
        assert re.search(r"^\s*__global__|\n__global__", text)
        assert f"X({operand.index}, {operand.name})" in text
        for entry in ("upconv_plan", "upconv_scratch_bytes", "upconv_forward"):
            assert re.search(rf"^UPCONV_ENTRY .*\b{entry}\(", text, re.M)


# --- Python --------------------------------------------------------------------------------------

MODULES = {
    "base.py": '''"""The base.

Two paragraphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

# What it is for.
SIZE = 3
"""Words under a constant."""
LOW, HIGH = 1, 2
UNUSED = prod((1, 2))


@dataclass(frozen=True)
class Thing:
    number: int
    next: Thing | None = None

    @staticmethod
    def of(number: int) -> Thing:
        return Thing(number + HIGH)


def unused() -> None:
    """Not wanted."""
''',
    "top.py": '''"""The top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import SIZE, Thing

if TYPE_CHECKING:
    from .later import Other


def make(
    numbers: Sequence[int], other: dict[str, Other] | None = None
) -> list[Thing]:
    """Things."""
    return [Thing.of(helper(n) * SIZE) for n in numbers]


# Helps.
def helper(number: int) -> int:
    return number
''',
}


def run(text: str, *names: str) -> list[object]:
    body = "\n".join("    " + line for line in text.splitlines())
    context: dict[str, object] = {}
    exec(f"def f():\n{body}\n    return [{', '.join(names)}]", context)
    return context["f"]()  # type: ignore[operator, no-any-return]


def test_the_bundle_works_and_holds_what_is_used(tmp_path: Path) -> None:
    text = python_source.bundle("top", ["make"], write(tmp_path, MODULES))
    (make,) = run(text, "make")
    assert [thing.number for thing in make([1, 2])] == [5, 8]  # type: ignore[operator]
    for kept in ("# The base.", "# What it is for.", "Words under a constant", "# Helps.", "LOW"):
        assert kept in text
    for gone in ("UNUSED", "unused", "prod", "__future__", "TYPE_CHECKING", "from .", "later"):
        assert gone not in text
    assert 'other: "dict[str, Other] | None" = None' in text
    assert "numbers: Sequence[int]," in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import math", "write `from module import name`"),
        ("from math import prod as product", "without another name"),
        ("from .base import SIZE as HEIGHT", "without another name"),
        ("from . import base", "only `from .module import name`"),
        ("from ..version import __version__", "only `from .module import name`"),
        ("from torch import nn", "torch is not in the standard library"),
        ("from .none import x", "imports .none, which is no module"),
        ("from .top import make", "import each other: top -> top|import each other"),
        ("for i in (1, 2): print(i)", "cannot hold For here"),
        ("SIZE = 4", "SIZE is defined in planner/base.py and planner/top.py"),
        ("def f():\n    try:\n        return 1\n    finally:\n        print()", "holds `try`"),
    ],
)
def test_what_cannot_be_moved_is_an_error(line: str, words: str, tmp_path: Path) -> None:
    files = MODULES | {"top.py": MODULES["top.py"] + line + "\n"}
    with pytest.raises(ExportError, match=re.escape(words).replace(r"\|", "|")):
        python_source.bundle("top", ["make"], write(tmp_path, files))
    with pytest.raises(ExportError, match="no planner module of this kernel defines absent"):
        python_source.bundle("base", ["absent"], write(tmp_path, MODULES))


def test_words_that_the_harness_misreads() -> None:
    assert rules.reworded("int pass = 0, passes;", rules.CUDA_WORDS) == "int lap = 0, passes;"
    with pytest.raises(ExportError, match="rename one"):
        rules.reworded("int pass, lap;", rules.CUDA_WORDS)
    prose = rules.reworded("the forward pass, all except one", rules.PYTHON_WORDS)
    assert prose == "the forward computation, all other than one"
