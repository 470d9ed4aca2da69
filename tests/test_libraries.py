"""Which compiled library holds what, and how one is come by."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from upconv import jit, libraries
from upconv.jit import recipe
from upconv.planner import DIRECTIONS, H200, KERNELS, Candidate, Problem
from upconv.planner.plan import SERVED

LAYERS = (
    (4, 64, 64, (16, 32), 2, 2),
    (4, 64, 64, (16, 32), 4, 2, 1),
    (4, 64, 64, (16, 32), 3),
    (2, 24, 24, (9, 10), 3, 2, 0, 0, 1, 4),
    (2, 8, 8, (32, 32), 3, 2, 0, 0, 1, 8),
)
TYPES = (
    ("float32", True),
    ("float32", False),
    ("float64", False),
    ("bfloat16", False),
    ("float16", False),
)


@cache
def emitted() -> dict[tuple[str, Problem], tuple[int, ...]]:
    """Plans of every GPU kernel that these layers have, in every type and direction."""
    found = {}
    for layer, (dtype, tf32), direction in product(LAYERS, TYPES, DIRECTIONS):
        problem = Problem.of(*layer, dtype=dtype, tf32=tf32, direction=direction)
        for name, consider in KERNELS.items():
            if direction in SERVED[name]:
                answer = consider(problem, H200)
                if isinstance(answer, Candidate):
                    found[name, problem] = answer.params
    return found


def test_every_type_of_every_kernel_has_a_library() -> None:
    plans = emitted()
    assert {kernel for kernel, _ in plans} == {name for name in KERNELS if name != "cpu_fprop"}
    held: dict[str, set[str]] = {}
    for kernel, problem in plans:
        library = libraries.library_of("cuda", kernel, problem)
        held.setdefault(library, set()).add(kernel)
        assert (library == "cuda_wgrad") == (problem.direction == "grad_weight")
        assert (library == "cuda_fp16") <= (problem.dtype == "float16")
        assert (library == "cuda_strict") <= problem.strict
    assert set(held) == set(libraries.of_device("cuda"))
    assert held["cuda"] == {
        *libraries.BY_OPERAND,
        "direct_fprop",
        "direct_igrad",
        "depthwise_igrad",
    }
    assert held["cuda_fp16"] == set(libraries.BY_OPERAND)
    assert held["cuda_strict"] == {"sm90_wgmma_fprop", "sm90_patch", "mma_fprop", "overlap_fprop"}


ROWS = {
    "mma": ("mma_fprop", "mma_launch"),
    "sm90": ("sm90_wgmma_fprop", "sm90_launch"),
    "patch": ("sm90_patch", "sm90_patch"),
    "phases": ("sm90_phases", "sm90_phases"),
    "walk": ("sm90_walk", "sm90_walk"),
    "overlap": ("overlap_fprop", "overlap_launch"),
    "gather_igrad": ("gather_igrad", "gather_igrad_launch"),
}
"""Rows of the bindings' table of kernels: the kernel, and the file with its host side."""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH")
@pytest.mark.parametrize("kind", libraries.OPERANDS_OF)
def test_a_library_has_the_kernels_that_plans_ask_of_it(kind: str) -> None:
    """A plan whose kernel is not in the table is left to PyTorch, and nobody would notice."""
    text = (recipe.CSRC / "binding" / "cuda_tensor_cores.h").read_text()
    function = text[text.index("inline KernelTable tensor_core_kernels") :]
    defines = ("-DUPCONV_SM90", f"-DUPCONV_OPERAND_BITS={libraries.operand_bits(kind)}")
    preprocessed = subprocess.run(
        ["g++", "-E", "-P", "-x", "c++", *defines, "-"],
        input=function,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = set(re.findall(r"(\w+)_kernel\(\)", preprocessed))
    asked = {
        kernel
        for kernel, problem in emitted()
        if libraries.library_of("cuda", kernel, problem) == kind
    }
    assert {ROWS[row][0] for row in rows} == asked & set(libraries.BY_OPERAND)
    compiled = {path.stem for path in recipe.make_spec(kind, (9, 0)).sources}
    assert {ROWS[row][1] for row in rows} <= compiled


def test_numbers_of_operands_are_the_planners() -> None:
    """What a launch file chooses by is what the library is chosen by."""
    from params_header import ParamsHeader

    headers = {
        "sm90_wgmma_fprop": ("sm90_params.h", "operand"),
        "sm90_patch": ("sm90_patch_params.h", "operand"),
        "sm90_phases": ("sm90_phases_params.h", "operand"),
        "sm90_walk": ("sm90_walk_params.h", "operand"),
        "mma_fprop": ("mma_params.h", "operand"),
        "gather_igrad": ("gather_params.h", "type"),
        "overlap_fprop": ("overlap_params.h", "type"),
    }
    assert set(headers) == set(libraries.BY_OPERAND)
    seen = set()
    for (kernel, problem), params in emitted().items():
        if kernel in headers:
            header, field = headers[kernel]
            number = params[ParamsHeader(header).fields().index(field)]
            assert libraries.OPERANDS[number] == libraries.operand_of(problem)
            seen.add((kernel, number))
    assert len(seen) == 3 * len(headers) + 4


def test_each_operand_is_in_one_library() -> None:
    held = [operand for operands in libraries.OPERANDS_OF.values() for operand in operands]
    assert sorted(held) == sorted(libraries.OPERANDS)
    assert [libraries.operand_bits(kind) for kind in libraries.OPERANDS_OF] == [3, 4, 8]


def test_libraries_of_a_device() -> None:
    assert libraries.of_device("cpu") == ["cpu"]
    assert [*libraries.of_device("cpu"), *libraries.of_device("cuda")] == list(libraries.KINDS)
    problem = Problem.of(*LAYERS[0], dtype="float16")
    assert libraries.library_of("cpu", "cpu_fprop", problem) == "cpu"
    assert libraries.needed_for("cpu", "cpu_fprop", problem) == ("cpu", "cpu")


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A library that is not there; what is asked of `jit`, and what comes of it."""
    state = SimpleNamespace(asked=[], loads=True, capturing=False, there=False)

    def load(kind: str) -> SimpleNamespace:
        state.asked.append(kind)
        state.there = state.loads
        return SimpleNamespace(ok=state.loads)

    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(libraries, "compiled", lambda kind: state.there)
    monkeypatch.setattr(libraries, "_not_served", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def test_a_library_is_loaded_once(loading: SimpleNamespace) -> None:
    assert libraries.serve("cuda_fp16")
    assert libraries.serve("cuda_fp16")
    assert loading.asked == ["cuda_fp16"]


def test_what_cannot_be_loaded_is_not_tried_again(loading: SimpleNamespace) -> None:
    loading.loads = False
    assert not libraries.serve("cuda_fp16")
    assert not libraries.serve("cuda_fp16")
    assert libraries.gave_up("cuda_fp16")
    assert not libraries.gave_up("cuda_strict")
    assert loading.asked == ["cuda_fp16"]


def test_nothing_is_built_inside_a_cuda_graph(loading: SimpleNamespace) -> None:
    loading.capturing = True
    assert not libraries.serve("cuda_strict")
    assert not libraries.gave_up("cuda_strict")
    assert loading.asked == []
    loading.capturing = False
    assert libraries.serve("cuda_strict")
    loading.capturing = True
    assert libraries.serve("cuda_strict"), "what is loaded serves inside a graph as well"
