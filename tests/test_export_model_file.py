"""Exporting a file that defines Model: what is understood, and what is refused in which words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from upconv import cli
from upconv.exporter import ExportError, model_child, model_file

HEAD = "import torch\nfrom torch import nn\nSTRIDE = 2\n"
INIT = """
class Model(nn.Module):
    def __init__(self, channels, out=16, *, kernel: int = 3):
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, out, kernel, stride=STRIDE)
"""
FORWARD = """
    def forward(self, x):
        return self.up(x)
"""
TAIL = """
def get_inputs():
    return [torch.rand(4, 32, 9, 9)]

def get_init_inputs():
    return [32]
"""


def read(tmp_path: Path, text: str) -> model_file.ModelFile:
    path = tmp_path / "model.py"
    path.write_text(text)
    return model_file.read(path)


def test_the_layer_the_input_and_the_constructor(tmp_path: Path) -> None:
    found = read(tmp_path, HEAD + INIT + FORWARD + TAIL)
    assert str(found.layer) == "ConvTranspose2d(32, 16, 3, stride=2)"
    assert found.input_size == (4, 32, 9, 9)
    assert "        channels,\n        out=16,\n        *,\n        kernel: int = 3,\n" in (
        found.model_class
    )
    assert "self.up = _nn.ConvTranspose2d(channels, out, kernel, stride=2)" in found.model_class
    assert "return _conv_transpose(x, self.up)" in found.model_class


def test_a_path_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(HEAD + INIT + FORWARD + TAIL)
    monkeypatch.chdir(tmp_path)
    assert model_file.read(Path("model.py")).input_size == (4, 32, 9, 9)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "forward",
    [
        "    def forward(self, x):\n        '''Words.'''\n        return self.up(x)\n",
        "    def forward(self, a: torch.Tensor):\n        b = self.up(a)\n        return b\n",
    ],
)
def test_ways_to_write_forward(forward: str, tmp_path: Path) -> None:
    assert read(tmp_path, HEAD + INIT + forward + TAIL).input_size == (4, 32, 9, 9)


@pytest.mark.usefixtures("in_this_process")
def test_plain_values_beside_the_layer_are_kept(tmp_path: Path) -> None:
    more = "        self.channels = channels * 2\n"
    found = read(tmp_path, HEAD + INIT + more + FORWARD + TAIL)
    assert "        self.channels = channels * 2\n" in found.model_class


@pytest.mark.usefixtures("in_this_process")
def test_huge_inputs_are_never_allocated(tmp_path: Path) -> None:
    tail = TAIL.replace("4, 32, 9, 9", "4096, 32, 9999, 9999")
    assert read(tmp_path, HEAD + INIT + FORWARD + tail).input_size[0] == 4096


TWO = "        self.other = nn.ConvTranspose2d(4, 4, 3)\n"
RELU = "        self.act = nn.ReLU()\n"
REFUSED = {
    "no model": (HEAD + TAIL, "missing: Model"),
    "nothing": ("", "missing: Model, get_inputs, get_init_inputs"),
    "no inputs": (HEAD + INIT + FORWARD, "missing: get_inputs, get_init_inputs"),
    "not python": ("class Model(:\n", "is not Python"),
    "zero bytes": ("\0", "is not Python"),
    "raises": ("1 / 0\n", "running the file failed with ZeroDivisionError"),
    "two layers": (HEAD + INIT + TWO + FORWARD + TAIL, "holds up .*, other "),
    "another layer": (HEAD + INIT + RELU + FORWARD + TAIL, r"act \(ReLU\)"),
    "conv": (HEAD + INIT.replace("ConvTranspose2d", "Conv2d") + FORWARD + TAIL, r"up \(Conv2d\)"),
    "a parameter": (
        HEAD + INIT + "        self.p = nn.Parameter(torch.ones(1))\n" + FORWARD + TAIL,
        "parameters or buffers beside its layer: p",
    ),
    "activation": (
        HEAD + INIT + FORWARD.replace("self.up(x)", "self.up(x).relu()") + TAIL,
        "forward does more than call the layer",
    ),
    "twice": (
        HEAD + INIT + FORWARD.replace("self.up(x)", "self.up(x) * 1") + TAIL,
        "forward does more",
    ),
    "output size": (
        HEAD + INIT + FORWARD.replace("self.up(x)", "self.up(x, output_size=(20, 20))") + TAIL,
        "forward does more",
    ),
    "more arguments": (
        HEAD + INIT + FORWARD.replace("self, x", "self, x, y=None") + TAIL,
        "forward does more",
    ),
    "two inputs": (
        HEAD + INIT + FORWARD + TAIL.replace("9, 9)]", "9, 9), 3]"),
        "a list of one tensor, got 2 things",
    ),
    "wrong input": (
        HEAD + INIT + FORWARD + TAIL.replace("4, 32", "4, 31"),
        "has 4 sizes, the second of them 32; got 4, 31, 9, 9",
    ),
    "wrong arguments": (
        HEAD + INIT + FORWARD + TAIL.replace("[32]", "[]"),
        r"Model\(\*get_init_inputs\(\)\) failed with TypeError",
    ),
    "a branch": (
        HEAD + INIT + "        if out > 4:\n            self.x = 1\n" + FORWARD + TAIL,
        "cannot export 'if out > 4",
    ),
    "its own weights": (
        HEAD + INIT + "        nn.init.zeros_(self.up.weight)\n" + FORWARD + TAIL,
        "cannot export 'nn.init.zeros_",
    ),
    "a hidden draw": (
        HEAD
        + INIT.replace("super().__init__()", "super().__init__(); self.t = torch.rand(3)")
        + FORWARD
        + TAIL,
        "__init__ uses torch",
    ),
    "a factory": (
        HEAD
        + "def make(a): return nn.ConvTranspose2d(a, 16, 3)\n"
        + INIT.replace("nn.ConvTranspose2d(channels, out, kernel, stride=STRIDE)", "make(channels)")
        + FORWARD
        + TAIL,
        r"must be made as nn.ConvTranspose2d\(...\), not as 'make",
    ),
    "star": (
        HEAD
        + INIT.replace(
            "channels, out=16, *, kernel: int = 3", "*channels, out=16, kernel=3"
        ).replace("(channels,", "(*channels,")
        + FORWARD
        + TAIL,
        "must name its arguments",
    ),
    "odd default": (
        HEAD + INIT.replace("out=16", "out=torch.tensor(16)") + FORWARD + TAIL,
        "the default of out is not a plain number",
    ),
    "another base": (
        HEAD + "class Base(nn.Module): ...\n" + INIT.replace("nn.Module", "Base") + FORWARD + TAIL,
        "must derive from nn.Module",
    ),
    "another name": (
        HEAD + INIT.replace("self.up =", "self.up = self.alias =") + FORWARD + TAIL,
        r"holds its layer under 2 names \((up, alias|alias, up)\)",
    ),
    "a patched method": (
        HEAD + INIT + FORWARD + TAIL + "Model.forward = lambda self, x: 2 * self.up(x)\n",
        "Model.forward is not what `class Model` says",
    ),
    "one more method": (
        HEAD + INIT + FORWARD + TAIL + "Model.__call__ = lambda self, x: x\n",
        "Model.__call__ is not what",
    ),
    "a patched attribute": (
        HEAD + INIT + FORWARD + TAIL + "Model.up = property(lambda self: torch.nn.ReLU())\n",
        "Model.up is not what|failed with",
    ),
    "another class of that name": (
        HEAD + INIT + FORWARD + TAIL + "Model = type('Model', (nn.Module,), dict(vars(Model)))\n",
        "failed with|is not what",
    ),
    "other methods": (
        HEAD + INIT + FORWARD + "\n    def __call__(self, x):\n        return 0\n" + TAIL,
        "Model must define __init__ and forward and nothing else|has hooks",
    ),
}


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child process does, done here: starting one with torch takes seconds."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(path: Path) -> dict[str, Any]:
        try:
            return model_child.describe(str(path))
        except model_child.Unfit as error:
            raise ExportError(f"{path}: {error}") from None

    monkeypatch.setattr(model_file, "_run", run)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("what", REFUSED)
def test_files_that_are_refused(what: str, tmp_path: Path) -> None:
    text, words = REFUSED[what]
    with pytest.raises(ExportError, match=words) as caught:
        read(tmp_path, text)
    assert "model.py" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys\nsys.exit(0)\n", "running the file failed with SystemExit"),
        ("import os\nos._exit(7)\n", "its process ended with code 7"),
    ],
)
def test_a_file_that_ends_its_process(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=words):
        read(tmp_path, text)


@pytest.mark.usefixtures("in_this_process")
def test_hooks_are_refused(tmp_path: Path) -> None:
    hook = "        self.up.register_forward_hook(print)\n"
    with pytest.raises(ExportError, match="has hooks"):
        read(tmp_path, HEAD + INIT + hook + FORWARD + TAIL)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "nn.ConvTranspose2d.forward = lambda self, x: x",
            "replaces torch.nn.modules.conv.ConvTranspose2d.forward, which",
        ),
        ("nn.Module.__call__ = lambda self, x: x", "replaces torch.nn.modules.module.Module.__ca"),
        (
            "nn.functional.conv_transpose2d = lambda *a: a[0]",
            "replaces torch.nn.functional.conv_transpose2d, which",
        ),
    ],
)
def test_a_file_that_changes_pytorch(statement: str, words: str, tmp_path: Path) -> None:
    """In its own process: it would change PyTorch here."""
    with pytest.raises(ExportError, match=words):
        read(tmp_path, HEAD + INIT + FORWARD + TAIL + statement + "\n")


def test_a_file_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "TIMEOUT_SECONDS", 1)
    with pytest.raises(ExportError, match="took over 1 s"):
        read(tmp_path, "import time\ntime.sleep(60)\n")


def test_what_it_prints_does_not_get_in_the_way(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    noise = "import os\nprint('noise')\nos.write(1, b'more noise')\n"
    assert read(tmp_path, HEAD + noise + INIT + FORWARD + TAIL).layer.in_channels == 32
    assert "noise" not in capfd.readouterr().out


@pytest.mark.usefixtures("in_this_process")
def test_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, words in (
        (tmp_path / "none.py", "does not exist"),
        (tmp_path, "is a folder"),
        ("kb999", "no case is called 'kb999'"),
    ):
        assert cli.main(["export", str(source), "-o", str(tmp_path / "out.py")]) == 2
        assert words in capsys.readouterr().err
    beside = tmp_path / "sizes.py"
    beside.write_text("CHANNELS = 32\n")
    text = HEAD + "from sizes import CHANNELS\n" + INIT + FORWARD + TAIL
    assert read(tmp_path, text.replace("[32]", "[CHANNELS]")).layer.in_channels == 32
