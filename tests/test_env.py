"""The UPCONV_* variables: defaults, tolerance, and errors that list the choices."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from upconv import env


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("UPCONV_")]:
        monkeypatch.delenv(name)
    yield
    monkeypatch.undo()
    env.reload()


def test_defaults():
    assert env.reload() == env.Settings(None, "auto", False, None, "auto")


def test_empty_means_default(monkeypatch):
    for row in env.variables():
        monkeypatch.setenv(row.name, "  ")
    assert env.reload() == env.Settings(None, "auto", False, None, "auto")


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("UPCONV_BACKEND", " Native ", "backend", "native"),
        ("UPCONV_BACKEND", "ATEN", "backend", "aten"),
        ("UPCONV_VERBOSE", "1", "verbose", True),
        ("UPCONV_VERBOSE", "off", "verbose", False),
        ("UPCONV_ISA", "AVX2", "isa", "avx2"),
        ("UPCONV_FORCE_KERNEL", "aten", "force_kernel", "aten"),
        ("UPCONV_CACHE_DIR", "/some/where/", "cache_dir", "/some/where"),
    ],
)
def test_values(monkeypatch, name, text, field, value):
    monkeypatch.setenv(name, text)
    assert getattr(env.reload(), field) == value


def test_folder_is_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPCONV_CACHE_DIR", "here")
    assert env.reload().cache_dir == str(tmp_path / "here")
    monkeypatch.setenv("UPCONV_CACHE_DIR", "~/there")
    assert env.reload().cache_dir == os.path.expanduser("~/there")


@pytest.mark.parametrize(
    ("name", "text", "choices"),
    [
        ("UPCONV_BACKEND", "cuda", "auto, native, aten"),
        ("UPCONV_VERBOSE", "loud", "0, 1"),
        ("UPCONV_ISA", "neon", "auto, avx512, avx2, scalar"),
        ("UPCONV_FORCE_KERNEL", "magic", "aten, "),
        ("UPCONV_CACHE_DIR", "~no-such-user-here/x", "home folder that does not exist"),
    ],
)
def test_bad_value_lists_the_choices(monkeypatch, name, text, choices):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=name) as error:
        env.reload()
    assert repr(text) in str(error.value)
    assert choices in str(error.value)
    # The report still works, and says the same.
    bad = [row for row in env.variables() if row.error]
    assert [(row.name, row.value) for row in bad] == [(name, text)]
    assert choices in bad[0].error


def test_read_once_until_reload(monkeypatch):
    env.reload()
    monkeypatch.setenv("UPCONV_BACKEND", "aten")
    assert env.settings().backend == "auto"
    assert env.reload().backend == "aten"
    assert env.settings().backend == "aten"


def test_every_setting_is_described():
    rows = env.variables()
    assert len(rows) == len(env.Settings.__dataclass_fields__)
    assert all(row.name.startswith("UPCONV_") and row.meaning for row in rows)


def test_nobody_else_reads_the_environment():
    package = Path(env.__file__).parent
    read = re.compile(r"""(environ\.get\(|getenv\(|environ\[)\s*["']UPCONV_""")
    readers = [path.name for path in package.rglob("*.py") if read.search(path.read_text())]
    assert readers == []
    assert read.search('os.environ.get("UPCONV_ISA")')
