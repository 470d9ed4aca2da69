"""The CUDA sources of a kernel family as one text, each file once, in the order of their use.

`#include "..."` of our own files is followed, `#include <...>` of the toolkit goes to the top. What
cannot be put into one text without changing its meaning is an ExportError, never a silent guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .errors import ExportError

CSRC = Path(__file__).resolve().parent.parent / "csrc"

_OWN_INCLUDE = re.compile(r'#include "([^"]+)"\s*$')
_SYSTEM_INCLUDE = re.compile(r"#include <([^>]+)>\s*$")


class _Bundle:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.system: dict[str, None] = {}
        self.sections: list[str] = []
        self.seen: set[Path] = set()
        self.open: list[Path] = []

    def add(self, path: Path) -> None:
        if path in self.seen:
            return
        if path in self.open:
            raise ExportError(f"{self.name(path)} includes itself, by way of others")
        self.open.append(path)
        body = self.body(path)
        self.open.pop()
        self.seen.add(path)
        heading = f"// {'=' * 5} {self.name(path)} {'=' * 90}"[:100]
        self.sections.append(f"{heading}\n\n{body.strip()}\n")

    def body(self, path: Path) -> str:
        """The file without its includes, which are added to the bundle first."""
        kept: list[str] = []
        depth, code = 0, False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            directive = line.strip()
            where = f"{self.name(path)}:{number}"
            if directive.startswith("#if"):
                depth += 1
            elif directive.startswith("#endif"):
                depth -= 1
            if directive.startswith("#include"):
                if depth:
                    raise ExportError(f"{where}: an #include inside #if cannot be inlined")
                if own := _OWN_INCLUDE.match(directive):
                    if code:
                        raise ExportError(f"{where}: an #include after code cannot be inlined once")
                    self.add(self.find(own[1], path, where))
                elif system := _SYSTEM_INCLUDE.match(directive):
                    self.system[system[1]] = None
                else:
                    raise ExportError(f"{where}: cannot inline {directive!r}")
            elif directive != "#pragma once":
                code = code or (bool(directive) and not directive.startswith(("//", "#")))
                kept.append(line)
        return re.sub(r"\n{3,}", "\n\n", "\n".join(kept))

    def find(self, name: str, including: Path, where: str) -> Path:
        for folder in (including.parent, self.root):
            if (folder / name).is_file():
                return (folder / name).resolve()
        raise ExportError(f'{where}: #include "{name}" names no file below {self.root}')

    def name(self, path: Path) -> str:
        return f"csrc/{path.relative_to(self.root).as_posix()}"


def bundle(files: Iterable[str], root: Path = CSRC) -> str:
    """The files (patterns relative to `root`) and everything of ours that they include."""
    root = root.resolve()
    whole = _Bundle(root)
    for file in files:
        found = sorted(root.glob(file))
        if not found:
            raise ExportError(f"the source {file} does not exist below {root}")
        for path in found:
            whole.add(path.resolve())
    includes = "".join(f"#include <{name}>\n" for name in sorted(whole.system))
    return "\n".join([includes, *whole.sections])


def without_types(text: str, names: Sequence[str]) -> str:
    """`text` less the namespace-level definitions that exist for one of the named types only.

    That is `struct Name {...};` and `template <> ... Name ... {...}`. Our sources are formatted, so
    that such a definition ends with the first line that begins with a brace.
    """
    if not names:
        return text
    either = "|".join(map(re.escape, names))
    start = re.compile(
        rf"^(?:struct (?:{either}) \{{|template <>\n[^{{;]*\b(?:{either})\b[^{{;]*\{{)", re.M
    )
    while found := start.search(text):
        end = re.compile(r"^\};?\n", re.M).search(text, found.end())
        if end is None:
            line = found[0].splitlines()[-1]
            raise ExportError(f"the definition that begins with {line!r} has no end")
        text = text[: found.start()] + text[end.end() :].lstrip("\n")
    return text
