"""Measurements as the scripts here keep them: JSON, a line each, packed by gzip or not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    content = Path(path).read_bytes()
    text = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    return [json.loads(line) for line in text.splitlines()]
