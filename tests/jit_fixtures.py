"""Fixtures for the tests of the build cache; a plugin, named by the modules that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from jit_helpers import finish, start, write_tiny

from upconv import env
from upconv.jit import loader


@pytest.fixture
def build_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of this test's own, with a blank in its name; it does not exist yet."""
    folder = tmp_path / "the cache"
    monkeypatch.setenv("UPCONV_CACHE_DIR", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(loader, "_results", {})
    env.reload()
    yield folder
    monkeypatch.undo()
    env.reload()


@pytest.fixture
def tiny_sources(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "the sources")


class Built(NamedTuple):
    sources: Path
    folder: Path


@pytest.fixture(scope="session")
def built_tiny(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The tiny library, built once: to be copied by tests that start warm."""
    folder = tmp_path_factory.mktemp("built")
    built = Built(write_tiny(folder / "sources"), folder / "cache")
    assert finish(start(*built))["built"]
    return built
