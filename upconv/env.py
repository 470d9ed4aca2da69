"""The UPCONV_* environment variables: the only place that reads them.

They are read once, at first use, so that a call costs a dictionary look-up and no more. Case and
surrounding blanks do not matter, an empty value means the default, and a value that makes no
sense is a ValueError that lists the choices.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """What the environment asks for, parsed."""

    cache_dir: str | None
    """Folder of the build cache, absolute; None: the usual place of the user."""
    backend: str
    """auto: native kernels where they win; native: a failed build is an error; aten: PyTorch's."""
    verbose: bool
    force_kernel: str | None
    isa: str


class Variable(NamedTuple):
    """One UPCONV_* variable, as documentation and as it stands now."""

    name: str
    default: str
    meaning: str
    value: str
    """What is set now, untouched; the default when nothing is."""
    is_set: bool
    error: str
    """Why the value cannot be used; empty when it can."""


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"is not one of {', '.join(choices)}")
        return text.lower()

    return parse


def _flag(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("is not one of 0, 1 (or false/true, no/yes, off/on)")
    return text.lower() in _TRUE


def _folder(text: str) -> str:
    folder = os.path.expanduser(text)
    if folder.startswith("~"):
        raise ValueError("names a home folder that does not exist")
    return os.path.abspath(folder)


def _kernel(text: str) -> str:
    from .planner.candidate import ATEN
    from .planner.plan import KERNELS

    return _choice(ATEN, *KERNELS)(text)


# field of Settings, variable, default, parser, meaning
_VARIABLES: tuple[tuple[str, str, str, Callable[[str], object], str], ...] = (
    (
        "cache_dir",
        "UPCONV_CACHE_DIR",
        "",
        _folder,
        "folder of the build cache (default: $XDG_CACHE_HOME/upconv, else ~/.cache/upconv)",
    ),
    (
        "backend",
        "UPCONV_BACKEND",
        "auto",
        _choice("auto", "native", "aten"),
        "auto: build upconv's kernels, use PyTorch's where that fails; "
        "native: a failed build is an error; aten: never build, use PyTorch's",
    ),
    (
        "verbose",
        "UPCONV_VERBOSE",
        "0",
        _flag,
        "1: say on stderr what is being built, even when stderr is not a terminal",
    ),
    (
        "force_kernel",
        "UPCONV_FORCE_KERNEL",
        "",
        _kernel,
        "kernel to use wherever it is legal, for tests and measurements (default: the fastest)",
    ),
    (
        "isa",
        "UPCONV_ISA",
        "auto",
        _choice("auto", "avx512", "avx2", "scalar"),
        "instruction set of the CPU kernel: auto, avx512, avx2 or scalar",
    ),
)

BUILDING = "_UPCONV_BUILDING"
"""Set by upconv itself, for the process that builds a library and all that this starts."""

_settings: Settings | None = None


def building() -> bool:
    """Was this process started to build a library?"""
    return BUILDING in os.environ


def _parse(name: str, default: str, parser: Callable[[str], object]) -> object:
    text = os.environ.get(name, "").strip() or default
    if not text:
        return None
    try:
        return parser(text)
    except ValueError as problem:
        raise ValueError(f"{name}={text!r} {problem}; change or unset it") from None


def settings() -> Settings:
    """The settings in force: read at the first call, kept from then on."""
    return _settings or reload()


def reload() -> Settings:
    """Read the environment again."""
    global _settings
    values = {
        field: _parse(name, default, parser) for field, name, default, parser, _ in _VARIABLES
    }
    _settings = Settings(**values)  # type: ignore[arg-type]
    return _settings


def variables() -> list[Variable]:
    """Every variable with its meaning and its present value. Never raises: made for reports."""
    rows = []
    for _, name, default, parser, meaning in _VARIABLES:
        error = ""
        try:
            _parse(name, default, parser)
        except ValueError as problem:
            error = str(problem)
        given = os.environ.get(name)
        rows.append(Variable(name, default, meaning, given or default, given is not None, error))
    return rows
