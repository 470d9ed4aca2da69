"""What `upconv verify` checks: a problem with the seed of its data, drawn or given as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from random import Random
from typing import Any

from .explain import check as check_problem
from .planner import Problem

DTYPES = ("float32", "float64", "bfloat16", "float16")
CHANNELS = (1, 1, 2, 3, 4, 5, 7, 8, 8, 9, 16, 17, 24, 33)
"""Of one group: 1, odd ones, and the multiples of 8 that the kernels are made for."""
LARGEST_SIZE = {1: 48, 2: 14, 3: 5}
LARGEST_KERNEL = {1: 7, 2: 5, 3: 4}


@dataclass(frozen=True)
class Configuration:
    """A problem and the seed of its data. `Problem.tf32` is this machine's affair."""

    problem: Problem
    seed: int

    def compact(self) -> str:
        record = asdict(self.problem) | {"seed": self.seed}
        del record["tf32"]
        return json.dumps(record, separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> Configuration:
        """What `compact` wrote; ValueError in words for anything else."""
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"--problem is not JSON: {error}; got {text!r}") from None
        if not isinstance(record, dict):
            raise ValueError(f"--problem must be a JSON object, got {text!r}")
        types = {f.name: str(f.type) for f in fields(Problem)} | {"seed": "int"}
        del types["tf32"]
        for complaint, names in (
            ("lacks", types.keys() - record.keys()),
            ("has the unknown", record.keys() - types.keys()),
        ):
            if names:
                raise ValueError(f"--problem {complaint} {', '.join(sorted(names))}")
        values = {name: _value(name, kind, record[name]) for name, kind in types.items()}
        seed = values.pop("seed")
        problem = Problem(**values)
        _check(problem, seed)
        return Configuration(problem, seed)


def _value(name: str, kind: str, given: Any) -> Any:
    """A field of --problem as `Problem` wants it: lists as tuples, and no other type than its."""
    if kind.startswith("tuple"):
        if isinstance(given, list) and given and all(type(part) is int for part in given):
            return tuple(given)
        raise ValueError(f"--problem: {name} must be a list of whole numbers, got {given!r}")
    if type(given).__name__ != kind:
        words = {"int": "a whole number", "bool": "true or false", "str": "a string"}[kind]
        raise ValueError(f"--problem: {name} must be {words}, got {given!r}")
    return given


def _check(problem: Problem, seed: int) -> None:
    if problem.ndim > 3:
        raise ValueError(f"--problem: in_size has 1, 2 or 3 numbers, got {problem.ndim}")
    if problem.dtype not in DTYPES:
        raise ValueError(f"--problem: dtype is one of {', '.join(DTYPES)}, got {problem.dtype!r}")
    if problem.channels_last and problem.ndim == 1:
        raise ValueError("--problem: 1-D tensors have no channels_last layout")
    if problem.batch < 1:
        raise ValueError(f"--problem: batch must be at least 1, got {problem.batch}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--problem: seed must be from 0 to 2^63 - 1, got {seed}")
    check_problem(problem)


def draw(seed: int, dtypes: Sequence[str] = DTYPES) -> Iterator[Configuration]:
    """Configurations without end, the same ones for the same seed.

    Dimensions and dtypes take turns, so that a short run meets all of them; the rest is drawn.
    """
    random = Random(seed)
    number = 0
    while True:
        yield _drawn(random, 1 + number % 3, dtypes[number // 3 % len(dtypes)])
        number += 1


def _drawn(random: Random, ndim: int, dtype: str) -> Configuration:
    """Small sizes: every dimension meets its edges often, and a run takes milliseconds."""
    groups = random.choice((1, 1, 1, 2, 3, 4))
    sizes = [_dimension(random, ndim) for _ in range(ndim)]
    in_size, kernel, stride, padding, output_padding, dilation = zip(*sizes, strict=True)
    problem = Problem(
        batch=random.randint(1, 3),
        in_channels=groups * random.choice(CHANNELS if groups == 1 else CHANNELS[:9]),
        out_channels=groups * random.choice(CHANNELS if groups == 1 else CHANNELS[:9]),
        in_size=in_size,
        kernel=kernel,
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        dilation=dilation,
        groups=groups,
        bias=random.random() < 0.5,
        dtype=dtype,
        channels_last=ndim > 1 and random.random() < 0.3,
    )
    return Configuration(problem, random.getrandbits(31))


def _dimension(random: Random, ndim: int) -> tuple[int, int, int, int, int, int]:
    size = random.randint(1, LARGEST_SIZE[ndim])
    kernel = random.randint(1, LARGEST_KERNEL[ndim])
    stride, dilation = random.randint(1, 4), random.randint(1, 3)
    output_padding = random.randint(0, max(stride, dilation) - 1)
    unpadded = (size - 1) * stride + dilation * (kernel - 1) + output_padding + 1
    padding = random.randint(0, min(4, (unpadded - 1) // 2))
    return size, kernel, stride, padding, output_padding, dilation
