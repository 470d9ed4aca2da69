"""A GPU kernel's parameter header, as far as the planner must agree with it."""

from __future__ import annotations

import re
from pathlib import Path

CUDA = Path(__file__).resolve().parent.parent / "upconv" / "csrc" / "cuda"


class ParamsHeader:
    def __init__(self, name: str) -> None:
        self.text = (CUDA / name).read_text()

    def fields(self) -> list[str]:
        """The scalar fields in the order of the C++ header."""
        return re.findall(r"^\s+X\((\w+)\)", self.text, re.MULTILINE)

    def constant(self, name: str) -> int:
        found = re.search(rf"constexpr int {name} = (\d+);", self.text)
        assert found, name
        return int(found.group(1))
