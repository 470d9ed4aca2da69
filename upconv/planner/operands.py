"""What the tensor cores are given, by the numbers that kernels know it by (`operand` or `type` in
their parameters)."""

from __future__ import annotations

OPERANDS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""By dtype; float32 is rounded to TF32."""
SPLIT = 3
"""float32 that must not be rounded: the sum of two numbers that the tensor cores multiply."""
