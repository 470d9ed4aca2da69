"""What runs everything on a GPU, with real processes but without a GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import on_gpu, sanitize
from upconv import cases, cli

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"


def step(name: str, text: str) -> on_gpu.Step:
    return on_gpu.python(name, "-c", text)


def test_each_step_is_reported_as_it_ended(tmp_path: Path, capsys) -> None:
    stages = [
        [step("good", "print('7 passed')"), step("bad", "import sys; sys.exit('2 were wrong')")],
        [step("after", "print('still run')")],
    ]
    outcomes = on_gpu.run_all(stages, tmp_path, 60)
    assert [(o.step.name, o.words, o.last) for o in outcomes] == [
        ("good", "passed", "7 passed"),
        ("bad", "failed (1)", "2 were wrong"),
        ("after", "passed", "still run"),
    ]
    assert (tmp_path / "good.log").read_text() == "7 passed\n"
    assert "failed (1)" in capsys.readouterr().out


def test_a_step_is_stopped_with_its_children_and_the_next_one_gets_its_share(
    tmp_path: Path,
) -> None:
    beat = tmp_path / "beat"
    endless = f"import time\nwhile True:\n    open({str(beat)!r}, 'a').write('.'); time.sleep(0.02)"
    hung = step("hung", "print('so far', flush=True)\n" + CHILD.format(endless))
    outcomes = on_gpu.run_all([[hung], [step("next", "print('fine')")]], tmp_path, 8)
    assert [o.words for o in outcomes] == ["stopped", "passed"]
    assert outcomes[0].last == "so far"
    size = beat.stat().st_size
    assert size > 0
    time.sleep(0.3)
    assert beat.stat().st_size == size, "a child of the stopped step goes on"


def test_every_sweep_is_looked_at_for_races_and_for_memory(tmp_path: Path) -> None:
    (stage,) = on_gpu.check(tmp_path)
    names = {each.name for each in stage}
    for sweep in sanitize.SWEEPS:
        assert {f"racecheck-{sweep}", f"memcheck-{sweep}"} <= names
    assert "tests" in names


def test_the_tables_are_of_all_cases(tmp_path: Path) -> None:
    commands = [each.command for stage in on_gpu.tables(tmp_path) for each in stage]
    assert len(commands) == 4
    for _, _, _, *words in commands:
        given = cli.build_parser().parse_args(words)
        assert cases.select(given.cases) == list(cases.CASES)
        assert given.device == "cuda"


def test_a_patch_is_measured_beside_the_tree_that_it_changes(tmp_path: Path) -> None:
    version = on_gpu.ROOT / "upconv" / "version.py"
    before = version.read_text()
    first = before.splitlines()[0]
    patch, other = tmp_path / "some.patch", tmp_path / "upconv"
    names = "--- a/upconv/version.py\n+++ b/upconv/version.py\n"
    patch.write_text(f"{names}@@ -1 +1,2 @@\n+# measured\n {first}\n")
    on_gpu.copy_patched(patch, other)
    assert (other / "upconv" / "version.py").read_text() == "# measured\n" + before
    assert version.read_text() == before
    folders = {
        each.name: each.folder for stage in on_gpu.compare(tmp_path, other) for each in stage
    }
    assert folders["before"] == folders["before-again"] == on_gpu.ROOT
    assert folders["patched"] == folders["patched-tests"] == other


def test_a_patch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    patch = tmp_path / "some.patch"
    patch.write_text("--- a/nothing.py\n+++ b/nothing.py\n@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(SystemExit, match="does not fit this tree"):
        on_gpu.copy_patched(patch, tmp_path / "upconv")


def test_a_patch_is_asked_for_where_it_is_needed(capsys) -> None:
    for arguments in (["compare", "x"], ["check", "x", "some.patch"]):
        with pytest.raises(SystemExit) as stopped:
            on_gpu.main(arguments)
        assert stopped.value.code == 2
        assert "wants a patch" in capsys.readouterr().err


def test_a_sweep_that_does_not_exist_is_refused_with_those_that_do() -> None:
    command = [sys.executable, "-m", "tools.sanitize", "nonsense"]
    run = subprocess.run(command, cwd=on_gpu.ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "nonsense is no sweep" in run.stderr
    assert "walks" in run.stderr
