"""The documents: every path is there, every command parses, every figure comes from a file."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from upconv import cli, env
from upconv.planner import DIRECTIONS
from upconv.planner.plan import KERNELS, PROVEN
from upconv.tables import markdown, read_results

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs/**", "tests", "benchmarks")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(p for f in FOLDERS for p in ROOT.glob(f"{f}/*.md"))])
TABLE = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end of table -->", re.DOTALL)
TOP_FOLDERS = {path.name for path in ROOT.iterdir()}

by_name = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def test_there_are_documents() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "design.md"} <= {
        path.name for path in DOCUMENTS
    }


@by_name
def test_every_path_exists(document: Path) -> None:
    text = document.read_text()
    quoted = re.findall(r"`([\w./-]+)`", text)
    named = [name for name in quoted if "/" in name and name.split("/")[0] in TOP_FOLDERS]
    named += [name for name in quoted if re.fullmatch(r"[\w-]+\.(md|toml|py)", name)]
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    for name in named:
        assert (ROOT / name).exists() or (document.parent / name).exists(), name
    for link in linked:
        assert (document.parent / link.partition("#")[0]).exists(), link
    tables = [ROOT / match[1] for match in TABLE.finditer(text)]
    assert all(path.exists() for path in tables)


@by_name
def test_lines_fit(document: Path) -> None:
    for number, line in enumerate(document.read_text().splitlines(), 1):
        assert len(line) <= 120, f"{document.name}:{number} has {len(line)} columns"


def commands(text: str) -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`(upconv [^`]+)`", text)
    return [line for line in [*lines, *inline] if line.startswith("upconv ")]


@by_name
def test_every_command_parses(document: Path) -> None:
    for command in commands(document.read_text()):
        if "COMMAND" in command:
            continue
        words = shlex.split(command, comments=True)[1:]
        options = cli.build_parser().parse_args(words)
        assert options.command == words[0], command


def test_commands_are_found() -> None:
    assert len([c for path in DOCUMENTS for c in commands(path.read_text())]) > 8


@by_name
def test_every_make_target_exists(document: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:`|^)make ([\w-]+)", document.read_text(), re.MULTILINE)
    assert set(named) <= set(targets)


@by_name
def test_tables_are_what_the_result_files_give(document: Path) -> None:
    for path, table in TABLE.findall(document.read_text()):
        assert table.strip() == markdown(read_results(ROOT / path)).strip()


def test_a_typed_figure_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The script that fills the tables says so when one was changed by hand, and mends it."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme_table.py"))
    main, true_text = script["main"], (ROOT / "README.md").read_text()
    found = TABLE.search(true_text)
    assert found is not None, "the README shows no table"
    readme = tmp_path / "README.md"
    readme.write_text(true_text.replace(found[2], found[2].replace("x |", "9x |", 1)))
    monkeypatch.setitem(main.__globals__, "README", readme)
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert readme.read_text() == true_text
    assert main(["--check"]) == 0
    assert main(["--chek"]) == 2


def test_the_plot_is_what_the_result_files_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script says so when a file under the picture has changed, and draws it anew."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme_plot.py"))
    main = script["main"]
    assert main(["--check"]) == 0, capsys.readouterr().out
    (tmp_path / "docs").mkdir()
    results = tmp_path / "h200.json"
    results.write_text((ROOT / "benchmarks/results/h200-forward-tf32-2026-11-18.json").read_text())
    monkeypatch.setitem(main.__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(main.__globals__, "PICTURE", tmp_path / "docs/images/speed-up.svg")
    assert main(["--check"]) == 1
    assert main([str(results)]) == 0
    first = (tmp_path / "docs/images/speed-up.svg").read_text()
    assert main(["--check"]) == 0
    assert main([str(results)]) == 0
    assert (tmp_path / "docs/images/speed-up.svg").read_text() == first
    results.write_text(results.read_text().replace('"median": 2', '"median": 3'))
    assert main(["--check"]) == 1
    assert main(["--chek"]) == main([]) == main([str(ROOT / "README.md")]) == 2


def test_readme_lists_every_variable() -> None:
    rows = re.findall(r"^\| `(UPCONV_\w+)` \| (\S*) ?\|", (ROOT / "README.md").read_text(), re.M)
    defaults = {name: default.strip("`") for name, default in rows}
    assert defaults == {variable.name: variable.default for variable in env.variables()}


def test_readme_names_every_subcommand() -> None:
    text = (ROOT / "README.md").read_text()
    for command in cli.COMMANDS:
        assert f"`upconv {command}" in text


def test_ci_runs_what_people_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "make test"


def test_the_changelog_has_this_version() -> None:
    from upconv.version import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_five_line_example_runs() -> None:
    """The README's example, with a real network for its MyGenerator."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    network = "torch.nn.Sequential(torch.nn.ConvTranspose2d(100, 8, 4), torch.nn.ReLU())"
    program = block[1].replace("MyGenerator()", network)
    assert network in program
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_list_of_kernels_is_whole() -> None:
    """Every kernel with its source and its planner module, and what is on trial as such."""
    text = (ROOT / "docs" / "kernels.md").read_text()
    entry = re.compile(r"^- \*\*`(\w+)`\*\* \(`([\w.]+)`,\s+`planner\.(\w+)`[^)]*\)([^:]*):", re.M)
    entries = entry.findall(text)
    assert sorted(name for name, *_ in entries) == sorted(KERNELS)
    for name, source, planner, trial in entries:
        assert (ROOT / "upconv/planner" / f"{planner}.py").exists(), planner
        assert any((ROOT / "upconv/csrc" / folder / source).exists() for folder in ("cpu", "cuda"))
        proven = any((name, direction) in PROVEN for direction in DIRECTIONS)
        assert name == "cpu_fprop" or proven == ("on trial" not in trial), name


def test_the_index_of_notes_is_whole() -> None:
    notes = ROOT / "docs" / "notes"
    text = (notes / "README.md").read_text()
    missing = [file.name for file in notes.glob("2*.md") if f"]({file.name})" not in text]
    assert not missing, "enter them under their subject"
