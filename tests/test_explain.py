"""`upconv.explain`: the plan in words says what the plan says, and bad layers get words too."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import upconv
from upconv import jit, ops
from upconv.autograd import pytorch_errs
from upconv.explain import Explanation, check, explain, explanation_of
from upconv.jit import loader
from upconv.planner import ATEN, H200, KERNELS, Hardware, Plan, Problem

CPU = Hardware("cpu", name="test CPU", threads=2, isa="avx2")
DCGAN = Problem.of(128, 512, 256, (8, 8), 4, stride=2, padding=1)


def test_the_function_is_public() -> None:
    assert upconv.explain is explain


def test_phases_and_taps_are_printed() -> None:
    text = str(explain(DCGAN, hardware=CPU))
    assert "ConvTranspose2d  512 -> 256 channels, kernel 4x4, stride 2, padding 1, bias" in text
    assert "input (128, 512, 8, 8) -> output (128, 256, 16, 16)" in text
    assert "outputs 0, 2, 4, ...  = tap[1]*input[q] + tap[3]*input[q-1]" in text
    assert "outputs 1, 3, 5, ...  = tap[0]*input[q+1] + tap[2]*input[q]" in text
    assert "from output (1, 0): [0][1] [0][3] [2][1] [2][3]" in text
    assert "4.00 times as many products" in text


def test_work_is_counted() -> None:
    explanation = explain(DCGAN, hardware=CPU)
    assert "34.36 GFLOP, at least 58.72 MB moved, 585 FLOP per byte" in str(explanation)
    assert explanation.intensity == DCGAN.flops / DCGAN.bytes
    assert explanation.waste_of_zeros == 4.0


@pytest.mark.parametrize("machine", [CPU, H200], ids=["cpu", "h200"])
def test_every_kernel_is_named_once(machine: Hardware) -> None:
    explanation = explain(DCGAN, hardware=machine)
    text = str(explanation)
    assert f"kernel   {explanation.kernel}" in text
    for kernel, reason in explanation.refused.items():
        assert f"{kernel}: {reason}" in text
    assert {explanation.kernel, *explanation.refused} | {ATEN} == {ATEN, *KERNELS}
    for note in explanation.plan.chosen.notes:
        assert note in text


def test_phases_without_taps_are_said_to_be_bias() -> None:
    explanation = explain(Problem.of(1, 3, 3, (8, 8), 2, stride=3), hardware=CPU)
    assert "outputs 2, 5, 8, ...  = no tap: bias alone" in str(explanation)
    assert "9 phases, 0 to 1 taps each; 5 without any" in str(explanation)


@pytest.mark.parametrize(
    ("kernel", "stride"), [((3, 4), (2, 5)), ((1, 7), (3, 2)), ((4, 4), (2, 2))]
)
def test_the_products_are_counted_as_if_each_had_been_looked_at(
    kernel: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    explanation = upconv.explain(Problem.of(1, 4, 4, (6, 6), kernel, stride), hardware=H200)
    counts = [len(taps) for _, taps in explanation.plan.phase_taps()]
    least, most, empty = min(counts), max(counts), counts.count(0)
    each = f"{most} taps each" if least == most else f"{least} to {most} taps each"
    line = f"{len(counts)} phases, {each}" + (f"; {empty} without any" if empty else "")
    (printed,) = [text for text in str(explanation).splitlines() if text.startswith("  all ")]
    assert printed.split(None, 1)[1] == line


def test_the_products_of_large_strides_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """5000 x 5000 of them take 6 GB. Of each dimension the first phases and taps are listed."""

    def refuse(plan: Plan) -> None:
        raise AssertionError("all phases were asked for")

    monkeypatch.setattr(Plan, "phase_taps", refuse)
    problem = Problem.of(1, 4, 4, (8, 8), (3, 9000), (5000, 5))
    text = str(upconv.explain(problem, hardware=H200))
    assert "5000 x 5 = 25000; inside a phase" in text
    assert "25000 phases, 0 to 1800 taps each; 24985 without any" in text
    assert "and 4936 more phases" in text
    assert "... (1544 more taps)" in text
    assert text.count("outputs ") == 64 + 5


def test_many_phases_are_counted_not_listed() -> None:
    text = str(explain(Problem.of(1, 3, 3, (8, 8), 16, stride=8, padding=4), hardware=CPU))
    assert "64 phases, 4 taps each" in text
    assert "from output" not in text


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Problem.of(1, 3, 3, (8, 8), 3, dtype="int32"), "int32 is left to PyTorch"),
        (Problem.of(1, 3, 3, (8,), 3, 10**9), "strides up to 65536; 1000000000 is left"),
    ],
    ids=["a type", "a stride"],
)
def test_what_has_no_plan_is_said_to_be_pytorchs(problem: Problem, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        explain(problem, hardware=CPU)


@pytest.mark.parametrize("kind", ["nn", "upconv"])
def test_layers_of_both_kinds(kind: str) -> None:
    module = nn if kind == "nn" else upconv
    layer = module.ConvTranspose2d(6, 9, (3, 5), (2, 1), (1, 0), (1, 0), 3, False, (1, 2))
    layer = layer.to(torch.bfloat16)
    problem = explain(layer, (4, 6, 7, 8)).problem
    assert problem == Problem(
        4, 6, 9, (7, 8), (3, 5), (2, 1), (1, 0), (1, 0), (1, 2), 3, False, "bfloat16"
    )
    assert problem.out_size == tuple(layer(torch.zeros(4, 6, 7, 8, dtype=torch.bfloat16)).shape[2:])


def test_input_may_be_a_tensor() -> None:
    layer = nn.ConvTranspose2d(8, 8, 3)
    x = torch.randn(2, 8, 5, 6)
    assert not explain(layer, x).problem.channels_last
    assert explain(layer, x.to(memory_format=torch.channels_last)).problem.channels_last
    assert explain(layer, torch.randn(8, 5, 6)).problem.batch == 1
    assert explain(layer, (5, 6)).problem.in_size == (5, 6)


def test_json_holds_what_the_text_says() -> None:
    explanation = explain(DCGAN, hardware=CPU)
    record = json.loads(json.dumps(explanation.as_dict()))
    assert record["kernel"] == explanation.kernel
    assert record["flops"] == DCGAN.flops
    assert record["problem"]["out_size"] == [16, 16]
    assert record["phases"][0][1]["taps"] == [{"k": 0, "shift": 1}, {"k": 2, "shift": 0}]
    assert record["refused"] == explanation.refused


def test_a_setting_that_overrules_the_plan_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from upconv import env

    monkeypatch.setenv("UPCONV_BACKEND", "aten")
    env.reload()
    try:
        explanation = explain(nn.ConvTranspose2d(64, 64, 4, 2, 1), (8, 64, 32, 32))
    finally:
        monkeypatch.undo()
        env.reload()
    assert explanation.kernel == ATEN
    text = str(explanation)
    assert "kernel   aten: PyTorch's operator runs, since UPCONV_BACKEND=aten\n" in text
    assert "planned  cpu_fprop, " in text
    assert not explanation.recorded


def test_it_says_that_a_library_was_tried_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = loader.LoadResult("cpu", False, reason="no C++ compiler")
    monkeypatch.setitem(loader._results, "cpu", failed)
    layer = nn.ConvTranspose2d(64, 64, 4, 2, 1)
    explanation = explain(layer, (1, 64, 32, 32))
    assert explanation.plan.kernel == "cpu_fprop"
    assert explanation.kernel == ATEN
    assert explanation.as_dict()["kernel"] == ATEN
    assert "kernel   aten: PyTorch's operator runs, since the library cpu is not" in str(
        explanation
    )
    assert "the library cpu is not available (no C++ compiler)" in str(explanation)
    elsewhere = explain(layer, (1, 64, 32, 32), hardware=explanation.plan.hardware)
    assert elsewhere.kernel == "cpu_fprop"


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("cuda", ["forward", "grad_input", "grad_weight"]),
        ("cuda_fp16", ["forward", "grad_input"]),
        ("cuda_wgrad", ["grad_weight"]),
    ],
)
def test_of_the_gpus_libraries_each_is_missed_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, kind: str, without: list[str]
) -> None:
    monkeypatch.setattr(jit, "obstacle", lambda asked: "no nvcc" if asked == kind else "")
    problem = Problem.of(128, 512, 256, (8, 8), 4, 2, 1, dtype="float16")
    explanation = explanation_of(problem, H200, here=True)
    assert list(explanation.missing) == without
    assert str(explanation).count("no nvcc") == len(without)
    assert f"the library {kind} is not available" in str(explanation)


def test_it_finds_out_what_nothing_has_tried_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new process, such as the command's, no library has been asked for."""
    monkeypatch.delitem(loader._results, "cpu", raising=False)
    layer = nn.ConvTranspose2d(64, 64, 4, 2, 1)
    monkeypatch.setattr(loader.store, "find", lambda *given, **more: [])
    assert explain(layer, (8, 64, 32, 32)).kernel == "cpu_fprop"  # to be built at the first call
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    explanation = explain(layer, (8, 64, 32, 32))
    assert explanation.kernel == ATEN
    assert "no C++ compiler was found" in explanation.missing["forward"]
    assert "cpu" not in loader._results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_records_gradients_is_said_as_it_is_done(dtype: torch.dtype) -> None:
    layer = upconv.ConvTranspose2d(16, 16, 4, 2, 1, dtype=dtype)
    seen = set()
    ops.clear_plans()
    for side in (8, 96):
        explanation = explain(layer, (1, 16, side, side))
        output = layer(torch.zeros(1, 16, side, side, dtype=dtype))
        ours = type(output.grad_fn).__name__ == "ConvTransposeFunctionBackward"
        by_pytorch = explanation.kernel == ATEN or bool(explanation.recorded)
        assert ours != by_pytorch or pytorch_errs(output)
        said = "recorded any gradient: PyTorch's operator runs" in str(explanation)
        assert said == bool(explanation.recorded)
        assert explanation.as_dict()["recorded_by_pytorch"] == explanation.recorded
        seen.add(said)
    assert seen == ({False} if pytorch_errs(layer.weight) else {True, False})


def test_who_records_gradients_on_a_gpu() -> None:
    """What all wanted passes save together decides: of many calls, the first alone, or none."""
    found = [
        explain(Problem.of(batch, 64, 64, (32, 32), 3, tf32=True), hardware=H200)
        for batch in (4, 24, 32, 40, 64)
    ]
    assert list(found[0].recorded) == ["any gradient"]
    assert ["grad_input"] in [list(explanation.recorded) for explanation in found]
    assert not found[-1].recorded
    assert "recorded any gradient: PyTorch's operator runs, since recording" in str(found[0])


def test_what_is_not_a_layer() -> None:
    with pytest.raises(TypeError, match="got Conv2d"):
        explain(nn.Conv2d(3, 3, 3), (3, 8, 8))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (None, "needs an input"),
        ((2, 7, 5, 5), "takes 8 channels, the input has 7"),
        ((2, 2, 8, 5, 5), "2 spatial dimensions"),
        ((0, 5), "input size must be at least 1"),
    ],
)
def test_inputs_that_do_not_fit(shape: tuple[int, ...] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        explain(nn.ConvTranspose2d(8, 8, 3), shape)


def test_a_problem_takes_no_input() -> None:
    with pytest.raises(ValueError, match="takes no input"):
        explain(DCGAN, (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Problem.of(1, 4, 4, (5, 5), 3, stride=0), "stride must be at least 1, got 0, 0"),
        (Problem.of(1, 4, 4, (5, 5), 3, padding=-1), "padding must be at least 0"),
        (Problem.of(-1, 4, 4, (5, 5), 3), "batch must be at least 0, got -1"),
        (Problem.of(1, 4, 4, (5, 5), (3, 3, 3)), "kernel needs one or 2 values, got 3, 3, 3"),
        (Problem.of(1, 4, 6, (5, 5), 3, groups=4), "out_channels = 6 is not divisible by groups"),
        (Problem.of(1, 4, 4, (5, 5), 3, output_padding=1), "output_padding = 1 must be smaller"),
        (Problem.of(1, 4, 4, (1, 5), 1, padding=1), "the output would be -1, 3"),
    ],
)
def test_impossible_problems(problem: Problem, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(problem)


def test_drawing_from_the_explanation(tmp_path: object) -> None:
    path = explain(DCGAN, hardware=CPU).draw(f"{tmp_path}/a.svg")
    assert path.stat().st_size > 1000


def test_explanations_are_values() -> None:
    assert explain(DCGAN, hardware=CPU) == explain(DCGAN, hardware=CPU)
    assert isinstance(explain(DCGAN, hardware=CPU), Explanation)


def test_a_kernel_that_is_forced_for_a_while_is_named() -> None:
    problem = Problem.of(1, 2, 2, (4, 4), 3)
    for kernel in ("cpu_fprop", "aten"):
        with ops.forced(kernel):
            assert explain(problem, hardware=None).plan.kernel == kernel
