"""Writes the benchmark tables of README.md from committed result files.

    python benchmarks/readme_table.py            rewrite the tables
    python benchmarks/readme_table.py --check    exit 1 if a table is not what its file gives

A table stands between a comment that names its file and one that ends it:

    <!-- table: benchmarks/results/NAME.json -->
    <!-- end of table -->
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from upconv.tables import markdown, read_results

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(text: str) -> str:
    """The text with every table made anew from its file."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{markdown(read_results(ROOT / match[2]))}\n\n{match[3]}"

    return TABLE.sub(table, text)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    before = README.read_text()
    after = filled(before)
    if arguments:
        if before != after:
            print("README.md is not what the result files give: run benchmarks/readme_table.py")
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
