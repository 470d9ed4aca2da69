"""The benchmark: wrong results are never timed, and what is written can be read back."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest
import torch
from torch import Tensor

from upconv import accuracy, bench, contenders, floor, gradients, jit, libraries, stopwatch, tables
from upconv.bench import Kind, Row, Settings, Timing, fit_batch, measure, summary
from upconv.cases import Case
from upconv.explain import explanation_of, this_hardware
from upconv.jit import loader
from upconv.planner import Problem

TINY = Case("tiny", 2, 4, 6, (5, 6), (3, 3), 2, 1, 1, 1, 2)
QUICK = Settings(seconds=0.02)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_case_from_end_to_end(dtype: str) -> None:
    stages: list[str] = []
    row = measure(TINY, replace(QUICK, dtype=dtype), stages.append)
    assert stages == ["fitting the batch", "checking against float64", "timing"]
    assert row.correct, row
    assert row.failure == ""
    assert set(row.times) == set(row.errors) == {"torch", "upconv"}
    assert all(timing.runs >= stopwatch.FEWEST_RUNS for timing in row.times.values())
    assert all(t.fastest <= t.low <= t.median <= t.high for t in row.times.values())


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_all_dimensions_and_layouts(ndim: int) -> None:
    case = Case("tiny", 2, 4, 4, (5,) * ndim, (3,) * ndim, 2, 1, 0, 1, 1)
    layouts = ["contiguous", "channels_last"] if ndim > 1 else ["contiguous"]
    for layout in layouts:
        assert measure(case, replace(QUICK, layout=layout)).correct


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    row = measure(TINY, replace(QUICK, device="cuda", against=tuple(contenders.KEYS)))
    assert row.correct, row
    assert row.problem.batch == TINY.batch
    assert row.ratio is not None
    assert set(row.times) == set(row.scratch) == set(row.rates) == set(contenders.TITLES)
    assert row.skipped == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["tf32", "float32", "bfloat16"])
def test_gradients_on_the_gpu(dtype: str) -> None:
    """The switch that makes float32 strict is back where it was after the row."""
    before = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    settings = replace(QUICK, device="cuda", dtype=dtype, direction="backward")
    row = measure(TINY, replace(settings, against=("default", "benchmark", "channels_last")))
    assert row.correct, row
    assert set(row.times) == set(row.scratch) == set(row.gradients)
    assert torch.backends.cudnn.conv.fp32_precision == before  # type: ignore[attr-defined]
    strict = measure(TINY, replace(settings, dtype="float32"))
    assert strict.errors["torch"] < 1e-5


def test_every_way_of_calling_pytorch_on_the_cpu() -> None:
    row = measure(TINY, replace(QUICK, against=tuple(contenders.KEYS)))
    timed = {"torch", "channels_last", "compile", "upconv"}
    assert set(row.times) == set(row.errors) == set(row.rates) == timed
    assert row.skipped == {"benchmark": "cudnn.benchmark is for GPUs only"}
    assert row.scratch == {}
    assert max(row.errors.values()) <= row.limit
    fastest = min(row.times[name].median for name in timed - {"upconv"})
    assert row.ratio == fastest / row.times["upconv"].median


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_gradients_from_end_to_end(ndim: int) -> None:
    case = Case("tiny", 2, 4, 6, (5,) * ndim, (3,) * ndim, 2, 1, 1, 1, 2)
    row = measure(case, replace(QUICK, direction="backward", against=("default", "compile")))
    assert row.correct, row
    assert row.kind == Kind("float32", "contiguous", "backward")
    assert set(row.times) == set(row.errors) == {"torch", "compile", "upconv"}
    assert all(set(parts) == set(gradients.NAMES) for parts in row.gradients.values())
    for name, parts in row.gradients.items():
        assert row.errors[name] == max(parts.values())
    assert Row.from_dict(json.loads(json.dumps(row.as_dict(), allow_nan=False))) == row


@pytest.mark.parametrize("part", gradients.NAMES)
def test_one_wrong_gradient_is_found_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Its value is right in the forward pass: only the gradient is off, by a tenth."""

    def off_in_one_gradient(*arguments: object) -> Tensor:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        index = gradients.NAMES.index(part)
        tensors[index] = 1.1 * tensors[index] - 0.1 * tensors[index].detach()
        return accuracy.TORCH_OPERATORS[2](*tensors, *arguments[3:])

    monkeypatch.setattr(accuracy, "upconv_operator", lambda ndim: off_in_one_gradient)
    assert measure(TINY, QUICK).correct
    row = measure(TINY, replace(QUICK, direction="backward"))
    assert not row.correct
    assert row.times == {}
    assert tables.verdict(row).startswith("WRONG: error")
    assert f"in the gradient of the {part}" in tables.verdict(row)
    assert row.wrong("torch") == ""


def test_the_floor_is_in_the_row() -> None:
    rates = floor.Rates(flop_per_s=1e9, byte_per_s=1e15)
    for direction, passes in (("forward", 1), ("backward", 2)):
        row = measure(TINY, replace(QUICK, direction=direction), rates=rates)
        assert row.floor_ms is not None
        assert isclose(row.floor_ms, passes * row.problem.flops / 1e9 * 1e3)
        for name, timing in row.times.items():
            assert isclose(row.share_of_floor[name], row.floor_ms / timing.median)
            assert isclose(row.rates[name]["tflop_per_s"], row.share_of_floor[name] * 1e-3)
        assert tables.floor_text(row).endswith("%")
    assert tables.floor_text(measure(TINY, QUICK)) == "-"


def test_the_commit_is_told_or_found() -> None:
    assert bench.report([], replace(QUICK, commit="abc"))["environment"]["commit"] == "abc"
    found = bench.report([], QUICK)["environment"]["commit"]
    there = (Path(__file__).parent.parent / ".git").exists()
    assert (found is not None) == there


def test_kinds_do_not_mix() -> None:
    """The geometric mean is one of rows that compare: each kind has a table of its own."""
    problem = TINY.problem(tf32=True)
    rows = [row_with("a", 8, 1), replace(row_with("a", 1, 2), problem=problem)]
    kinds = [Kind("float32", "contiguous", "forward"), Kind("tf32", "contiguous", "forward")]
    assert list(bench.by_kind(rows)) == kinds
    results = bench.report(rows, QUICK)
    assert [found["worst"] for found in results["summaries"]] == [8.0, 0.5]
    text = tables.markdown(results)
    assert text.count("| case |") == 2
    assert "; tf32, contiguous, forward;" in text


def test_rates_are_work_by_time() -> None:
    row = row_with("a", 2.0, 1.0)
    flops, traffic = row.problem.flops, row.problem.bytes
    assert isclose(row.rates["torch"]["tflop_per_s"], flops / 2e-3 / 1e12)
    assert isclose(row.rates["upconv"]["tb_per_s"], traffic / 1e-3 / 1e12)


def test_every_row_says_which_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, which tries to build it, and those after it."""
    kind = "cuda_strict"  # in the place of one that the CPU's kernel might have by itself
    failed = loader.LoadResult(kind, False, reason="no compiler")
    monkeypatch.setitem(loader._results, kind, failed)
    by_kernel = lambda _, kernel, __: "cpu" if kernel == "aten" else kind  # noqa: E731
    monkeypatch.setattr(libraries, "library_of", by_kernel)
    case = Case("dense", 1, 64, 64, (16, 16), (4, 4), 2, 1, 0, 1, 1)
    row = measure(case, QUICK)
    assert explanation_of(row.problem, this_hardware("cpu"), here=True).plan.kernel == "cpu_fprop"
    assert (row.kernel, row.reason) == ("aten", "no compiler")


def test_a_row_says_what_ran_after_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what stood in the way of the library before it was tried."""
    asked = []

    def obstacle(kind: str) -> str:
        asked.append(kind)
        return "the last build failed" if len(asked) == 1 else ""

    monkeypatch.setattr(jit, "obstacle", obstacle)
    row = measure(Case("dense", 1, 64, 64, (16, 16), (4, 4), 2, 1, 0, 1, 1), QUICK)
    assert asked
    assert row.kernel == "cpu_fprop"


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (lambda *given: torch.zeros(3), "wrong: error inf"),
        (lambda *given: torch.mm(given[0], given[0]), "failed: RuntimeError: self must be a"),
    ],
)
def test_a_peer_that_is_wrong_or_fails_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, peer: accuracy.Operator, reason: str
) -> None:
    """The others are, and the row says why that one was not."""
    monkeypatch.setattr(contenders, "compiled", lambda operator: peer)
    row = measure(TINY, replace(QUICK, against=("compile", "default")))
    assert row.correct
    assert set(row.times) == {"torch", "upconv"}
    assert row.skipped["compile"].startswith(reason)
    assert tables.skipped_lines([row]) == [
        f"compile was not timed (all cases): {row.skipped['compile']}"
    ]
    assert "torch.compile ms" in tables.time_columns(tables.contenders_of([row]))
    assert Row.from_dict(json.loads(json.dumps(row.as_dict(), allow_nan=False))) == row


def off_by(change: float) -> accuracy.Operator:
    def operator(*arguments: object) -> Tensor:
        y = accuracy.TORCH_OPERATORS[2](*arguments)
        y[0, 0, 0, 0] += change
        return y

    return operator


@pytest.mark.parametrize("change", [0.1, float("nan"), float("inf")])
def test_a_wrong_result_is_found_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, change: float
) -> None:
    monkeypatch.setattr(accuracy, "upconv_operator", lambda ndim: off_by(change))
    row = measure(TINY, QUICK)
    assert not row.correct
    assert row.times == {}
    assert row.ratio is None
    assert tables.verdict(row).startswith("WRONG: error")


def test_a_wrong_shape_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "upconv_operator", lambda ndim: lambda *given: torch.zeros(3))
    row = measure(TINY, QUICK)
    assert row.errors["upconv"] == float("inf")
    assert Row.from_dict(json.loads(json.dumps(row.as_dict(), allow_nan=False))) == row


def test_a_failing_case_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> Tensor:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(accuracy, "upconv_operator", lambda ndim: broken)
    row = measure(TINY, QUICK)
    assert row.failure == "RuntimeError: out of memory"
    assert not row.correct
    assert "failed: RuntimeError" in tables.verdict(row)


def test_errors_are_shares_of_the_largest_output() -> None:
    problem = Problem.of(3, 4, 6, (5, 6), 3, stride=2, groups=2, dtype="float64")
    inputs = accuracy.make_inputs(problem)
    y = inputs.run(accuracy.TORCH_OPERATORS[2])
    wrong = y.clone()
    wrong[2, 5, 3, 3] += 0.25
    exact, off = accuracy.errors(inputs, problem, [y, wrong])
    assert exact < 1e-14
    assert isclose(off, 0.25 / float(y.abs().max()), rel_tol=1e-9)


def test_the_reference_in_pieces_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """With almost no scratch allowed it is made channel by channel, with the same result."""
    problem = Problem.of(2, 6, 9, (4, 5), 3, stride=2, padding=1, groups=3, dtype="float64")
    inputs = accuracy.make_inputs(problem)
    y = inputs.run(accuracy.TORCH_OPERATORS[2])
    monkeypatch.setattr(accuracy, "REFERENCE_BYTES", 1)
    assert accuracy.errors(inputs, problem, [y])[0] < 1e-14


def test_the_limit_leaves_room_for_rounding_only() -> None:
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        for case in (TINY, Case("deep", 1, 512, 8, (4, 4), (4, 4), 1, 0, 0, 1, 1)):
            problem = case.problem(dtype=dtype)
            inputs = accuracy.make_inputs(problem)
            y = inputs.run(accuracy.TORCH_OPERATORS[2])
            (error,) = accuracy.errors(inputs, problem, [y])
            assert error <= accuracy.limit(problem) < 0.05


def test_the_batch_is_cut_until_a_call_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in clock: 0.3 s a sample, so that 3 of 24 samples fit below a second."""
    batches: list[int] = []

    def seconds(call: object) -> float:
        size = call()[0].shape[0]  # type: ignore[operator]
        batches.append(size)
        return 0.3 * size

    monkeypatch.setattr(stopwatch, "seconds_of", seconds)
    assert fit_batch(replace(TINY.problem(), batch=24)).batch == 3
    assert max(batches) <= 6  # the full batch was never run
    assert fit_batch(replace(TINY.problem(), batch=1)).batch == 1


def row_with(case: str, torch_ms: float, upconv_ms: float) -> Row:
    times = {"torch": Timing.of([torch_ms] * 7), "upconv": Timing.of([upconv_ms] * 7)}
    errors = {"torch": 1e-7, "upconv": 2e-7}
    return Row(case, TINY.problem(), 2, "cpu_fprop", "", "forward", errors, 1e-6, times)


def test_summary_is_the_geometric_mean_and_the_worst() -> None:
    rows = [row_with("a", 8, 1), row_with("b", 1, 2), replace(row_with("c", 1, 1), times={})]
    found = summary(rows)
    assert isclose(found["geometric_mean"], 2.0)
    assert (found["worst"], found["worst_case"], found["cases"]) == (0.5, "b", 2)
    assert tables.summary_line(found) == "2 cases: geometric mean 2.00x, worst 0.50x (b)"
    assert tables.summary_line(summary([])) == "nothing was timed"


def test_the_table_has_a_column_for_everyone() -> None:
    row = row_with("a", 8, 1)
    row = replace(row, times=row.times | {"channels_last": Timing.of([4.0] * 7)})
    assert row.ratio == 4.0
    text = tables.markdown(bench.report([row], QUICK))
    assert "| PyTorch ms | channels_last ms | upconv ms | over the fastest |" in text
    assert "| 8 | 4 | 1 | 4.00x |" in text


def test_results_survive_a_file(tmp_path: Path) -> None:
    rows = [measure(TINY, QUICK), row_with("b", 300.4, 100)]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(bench.report(rows, QUICK)))
    results = tables.read_results(path)
    assert [Row.from_dict(record) for record in results["rows"]] == rows
    assert results["environment"]["torch"] == torch.__version__
    lines = tables.markdown(results).splitlines()
    expected = "| b | 4 → 6, 5x6, k 3, s 2, p 1, op 1, g 2 | 2 | cpu_fprop | 300 | 100 | 3.00x |"
    assert lines[-1].startswith(expected)
    assert f"PyTorch {torch.__version__}" in lines[1]
