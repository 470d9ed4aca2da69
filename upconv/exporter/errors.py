"""What can go wrong in an export."""

from __future__ import annotations


class ExportError(ValueError):
    """No file can be written; the text says what was wrong, what was given and what to do."""
