"""`upconv report`: result files of `upconv bench` as one page that needs nothing else.

`entries` reads the files, `marks` and `charts` draw, `tables_html` and `page` write the HTML;
`page.css`, `media.css` and `filters.js` are put into it as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..results import ResultsError, write_whole
from .entries import read_entries
from .page import page

__all__ = ["write_report"]


def write_report(paths: Sequence[str | Path], out: str | Path) -> Path:
    """The page for these result files, written to `out`; ResultsError where one holds none."""
    target = Path(out)
    if not target.resolve().parent.is_dir():
        raise ResultsError(f"-o {target}: its folder does not exist")
    if target.exists() and not target.is_file():
        raise ResultsError(f"-o {target} is not a plain file")
    write_whole(target, page(read_entries(paths)))
    return target
