"""The rules of KernelBench's harness: each one is found broken, and spares what it must spare."""

from __future__ import annotations

import pytest

from upconv.exporter import rules

FINE = '''
import torch
from torch import nn as _nn
from torch.utils.cpp_extension import load_inline as _load_inline
_CUDA = """__global__ void kernel() {}"""
class ModelNew(_nn.Module):
    """Nothing."""
'''


@pytest.mark.parametrize(
    "line",
    [
        "from __future__ import annotations",
        "import numpy as _numpy",
        "from . import sibling as _sibling",
        "import threading as _t",
        "import multiprocessing as _m",
        "height = 3",
        "def get_inputs(): return []",
        "import os",
        "for i in range(3): _x = i",
        "_x = 'the forward pass'",
        "_x = '/* int pass = 0; */'",
        "_x = 'all except one'",
        "_x = 'first try : then'",
        "_x = torch.nn.ConvTranspose2d(1, 1, 1)",
        "_x = torch.conv_transpose2d",
        "_x = torch.tanh(_y)",
        "from torch.nn import functional as F; F.relu(_y)",
        "_x = _nn.functional.relu",
        "_s = torch.cuda.Stream()",
        "class _T(torch.Tensor): ...",
        "torch.cuda.synchronize = None",
        "torch.cuda.Event.record = None",
        "torch.library.define('a::b', '() -> ()')",
        "_x = 'TORCH_LIBRARY(a, b)'",
        "_x = __file__",
        "if __name__ == '_': _x = 1",
        "_x = '__float2half_rn(v)'",
        "_x = 'static_cast<half>(v)'",
        "_x = _y.half()",
        "_x = _y.to(torch.float16)",
    ],
)
def test_a_broken_rule_is_found(line: str) -> None:
    assert rules.violations(FINE, "float32") == []
    if line == "_x = torch.conv_transpose2d":
        line += "(_y)"
    assert rules.violations(FINE + line + "\n", "float32") != []


def test_comments_do_not_count_but_code_must_be_there() -> None:
    spared = FINE + "# no try: and no pass here\n_x = 1  # except that\n_y = '// pass'\n"
    assert rules.violations(spared, "float32") == []
    assert rules.violations(FINE + "_x = '__float2half_rn(v)'\n", "float16") == []
    commented = FINE.replace("__global__", "// __global__")
    assert rules.violations(commented, "float32") == ["__global__ does not occur outside comments"]
    assert rules.violations(FINE.replace("ModelNew", "_Model"), "float32") != []
