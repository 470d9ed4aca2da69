"""`upconv verify`: what it covers, and what it says when a result is wrong."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor

from upconv import accuracy, autograd, cli, plans, verify
from upconv.configurations import Configuration, draw
from upconv.planner import Problem

DTYPES = {"float32", "float64", "bfloat16", "float16"}
GIVEN = Configuration(Problem.of(2, 3, 5, (4, 3), 3, 2, 1, 1), 7)

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other would take most of the time of calls this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*words: str) -> int:
    return cli.main(["verify", "--device", "cpu", *words])


def spoil(
    monkeypatch: pytest.MonkeyPatch, spoiled: Callable[[Tensor], Tensor], ndim: int = 3
) -> None:
    """Makes the function under test wrong for one number of dimensions."""
    right = accuracy.upconv_operator

    def operator(dimensions: int) -> accuracy.Operator:
        if dimensions != ndim:
            return right(dimensions)
        return lambda *given: spoiled(right(dimensions)(*given))

    monkeypatch.setattr(accuracy, "upconv_operator", operator)


def one_wrong(y: Tensor) -> Tensor:
    y = y.clone()
    y.view(-1)[-1] += 0.5
    return y


def test_a_short_run_is_green_and_covers_everything(capsys: Capture) -> None:
    assert run("--seconds", "6", "--seed", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mismatch"] is None
    assert report["seed"] == 1
    assert set(report["dimensions"]) == {"1-D", "2-D", "3-D"}
    assert set(report["dtypes"]) == DTYPES
    assert set(report["layouts"]) == {"contiguous", "channels_last"}
    assert set(report["kernels"]) == {"aten", "cpu_fprop"}
    assert sum(report["dimensions"].values()) == report["configurations"]
    assert report["comparisons"] > 4 * report["configurations"]
    for closest in report["closest"].values():
        assert 0 < closest["error"] <= closest["limit"]


def test_the_text_says_what_was_covered(capsys: Capture) -> None:
    assert run("--seconds", "0.2", "--seed", "5", "--dtype", "float64", "--kernel", "aten") == 0
    out, err = capsys.readouterr()
    assert "seed 5: no mismatch" in out
    assert "dimensions  1-D " in out
    assert "dtypes      float64 " in out
    assert "no kernel of upconv's ran" in out
    assert err == ""  # no counter where there is no terminal


def test_the_same_seed_draws_the_same() -> None:
    drawn = list(islice(draw(3), 60))
    assert drawn == list(islice(draw(3), 60))
    assert drawn != list(islice(draw(4), 60))
    assert len(set(drawn)) == 60


def test_drawn_configurations_are_legal_and_varied() -> None:
    drawn = list(islice(draw(0), 2000))
    for configuration in drawn:
        # parse checks what a transposed convolution must satisfy
        assert Configuration.parse(configuration.compact()) == configuration
    problems = [configuration.problem for configuration in drawn]
    assert {p.bias for p in problems} == {True, False}
    assert {p.groups for p in problems} == {1, 2, 3, 4}
    assert {1, 3, 8} <= {p.in_channels for p in problems} & {p.out_channels for p in problems}
    for name in ("stride", "padding", "output_padding", "dilation", "kernel"):
        assert len({value for p in problems for value in getattr(p, name)}) >= 3, name
    assert {p.dtype for p in islice(problems, 12) if p.ndim == 2} == DTYPES


def test_a_mismatch_can_be_run_again(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        spoil(patch, one_wrong)
        assert run("--seconds", "60", "--seed", "2") == 1
        out = capsys.readouterr().out
        assert "2 configurations" in out  # 1-D and 2-D came first, and were right
        assert "MISMATCH: output, kernel " in out
        expected = next(islice(draw(2), 2, None))
        problem = expected.problem
        last = [problem.batch - 1, problem.out_channels - 1, *(n - 1 for n in problem.out_size)]
        assert f"first at {last}: " in out
        line = out.splitlines()[-1]
        words = shlex.split(line)
        assert words[:3] == ["upconv", "verify", "--problem"]
        assert Configuration.parse(words[3]) == expected

        assert cli.main(words[1:]) == 1
        again = capsys.readouterr().out
        assert again.splitlines()[-1] == line
        assert f"first at {last}: " in again
    assert cli.main(words[1:]) == 0
    assert "1 configuration, " in capsys.readouterr().out


@pytest.mark.parametrize("kernel", ["auto", "cpu_fprop", "aten"])
def test_the_reproducer_asks_for_the_same_kernel(
    kernel: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPCONV_ISA", "auto")
    spoil(monkeypatch, one_wrong, ndim=2)
    assert run("--problem", GIVEN.compact(), "--kernel", kernel, "--json") == 1
    line = json.loads(capsys.readouterr().out)["mismatch"]["reproducer"]
    assert line.startswith("UPCONV_ISA=auto upconv verify --problem ")
    assert line.endswith(f" --kernel {kernel} --device cpu")


def raises(y: Tensor) -> Tensor:
    raise RuntimeError("no such tile")


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        (lambda y: y[..., :-1], "(2, 5, 8, 5) of torch.float32, not (2, 5, 8, 6)"),
        (torch.Tensor.double, "of torch.float64, not (2, 5, 8, 6) of torch.float32"),
        (lambda y: y * float("nan"), "480 of 480 wrong, first at [0, 0, 0, 0]: nan, not "),
        (lambda y: y * 1.0001, "wrong, first at ["),
        (raises, "raised RuntimeError: no such tile"),
    ],
)
def test_ways_to_be_wrong(
    spoiled: Callable[[Tensor], Tensor],
    words: str,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(monkeypatch, spoiled, ndim=2)
    assert run("--problem", GIVEN.compact()) == 1
    assert words in capsys.readouterr().out


def test_memory_left_unwritten_holds_nans() -> None:
    """Most often: which memory an allocation gets is the allocator's choice."""
    found = 0
    for length in range(10, 4000, 20):
        verify.poison((length,), torch.float32, torch.device("cpu"))
        found += bool(torch.empty(length).isnan().any())
    assert found > 100  # of 200


def test_what_pytorch_gets_wrong_is_not_held_against_us(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = verify.Comparison._by_torch

    def by_torch(self: verify.Comparison, prepare: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        results = right(self, prepare)
        if prepare is torch.Tensor.detach:
            results["gradient of the weight"] *= float("nan")
        return results

    monkeypatch.setattr(verify.Comparison, "_by_torch", by_torch)
    gradient = autograd.aten_weight_gradient
    monkeypatch.setattr(
        autograd, "aten_weight_gradient", lambda *given: one_wrong(gradient(*given))
    )
    assert run("--problem", GIVEN.compact(), "--kernel", "cpu_fprop") == 0
    assert "1 left out: PyTorch's own result is wrong there" in capsys.readouterr().out
    spoil(monkeypatch, one_wrong, ndim=2)  # the output of our own kernel has no such excuse
    assert run("--problem", GIVEN.compact(), "--kernel", "cpu_fprop") == 1


def test_wrong_gradients_are_found(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, what in (
        ("aten_input_gradient", "input"),
        ("aten_weight_gradient", "weight"),
        ("bias_gradient", "bias"),
    ):
        right = getattr(autograd, name)
        with monkeypatch.context() as patch:
            patch.setattr(autograd, name, lambda *given, right=right: one_wrong(right(*given)))
            assert run("--problem", GIVEN.compact(), "--kernel", "cpu_fprop") == 1
        assert f"MISMATCH: gradient of the {what}, kernel cpu_fprop" in capsys.readouterr().out


def test_ctrl_c_says_what_was_covered(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda y: signal.raise_signal(signal.SIGINT) or y)
    assert run("--seconds", "60", "--seed", "2") == 130
    out = capsys.readouterr().out
    assert out.startswith("2 configurations, ")
    assert "no mismatch, interrupted" in out
    assert "dimensions  1-D 1, 2-D 1" in out


def test_a_terminal_gets_a_counter(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("--seconds", "0.3", "--seed", "6") == 0
    assert re.search(r"\d+ configurations, seed 6", capsys.readouterr().err)


def test_plans_are_free_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, raises, ndim=2)
    assert run("--problem", GIVEN.compact(), "--kernel", "cpu_fprop") == 1
    assert plans._forced == []


def changed(**fields: object) -> str:
    return json.dumps(json.loads(GIVEN.compact()) | fields)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--problem", "{'batch': 1}"], "--problem is not JSON: "),
        (["--problem", "[1, 2]"], "--problem must be a JSON object"),
        (["--problem", "{}"], "--problem lacks batch, bias, channels_last"),
        (["--problem", changed(tf32=True)], "--problem has the unknown tf32"),
        (["--problem", changed(batch="2")], "batch must be a whole number, got '2'"),
        (["--problem", changed(batch=0)], "batch must be at least 1, got 0"),
        (["--problem", changed(stride=2)], "stride must be a list of whole numbers, got 2"),
        (["--problem", changed(stride=[2])], "stride needs one or 2 values, got 2"),
        (["--problem", changed(padding=[9, 9])], "the output would be -8, -10"),
        (["--problem", changed(dtype="int8")], "dtype is one of float32, "),
        (["--problem", changed(in_size=[1] * 4)], "in_size has 1, 2 or 3 numbers, got 4"),
        (["--problem", changed(seed=-1)], "seed must be from 0"),
        (["--problem", GIVEN.compact(), "--seed", "3"], "leave --seed out"),
        (["--problem", changed(channels_last=True), "--kernel", "cpu_fprop"], "reads and writes"),
        (["--kernel", "sm90_wgmma_fprop"], "cannot serve this on --device cpu: "),
        (["--kernel", "fast"], "there is no 'fast'; choose from auto, aten, cpu_fprop"),
        (["--seconds", "0"], "--seconds must be more than 0, got 0"),
    ],
)
def test_bad_usage_is_explained(words: list[str], complaint: str, capsys: Capture) -> None:
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("upconv verify: ")
    assert complaint in err


def test_a_gpu_that_is_not_there(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["verify", "--device", "cuda"]) == 2
    assert "torch finds no CUDA GPU here" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_short_run_on_the_gpu(capsys: Capture) -> None:
    # All types within some seconds, also where the GPU has other work beside it.
    words = ["verify", "--device", "cuda", "--seconds", "15", "--seed", "1", "--json"]
    assert cli.main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["dtypes"]) == DTYPES
    assert "aten" in report["kernels"]
