"""The subcommand `upconv export`: its options, and what it says when it is done."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .render import Rendered

DTYPES = ("float32", "bfloat16", "float16", "float64")


def capability(text: str) -> tuple[int, int]:
    """Reads 9.0."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a compute capability such as 9.0")
    return int(major), int(minor)


def add_parser(commands: Any, add_layer_options: Callable[[argparse.ArgumentParser], None]) -> None:
    export = commands.add_parser("export", help="one Python file, ModelNew, with the kernel inside")
    export.add_argument(
        "source",
        nargs="?",
        help="a file that defines Model, get_inputs and get_init_inputs, or a built-in case such "
        "as kb69; or give the layer by options",
    )
    add_layer_options(export)
    export.add_argument("--no-bias", action="store_true")
    export.add_argument("--dtype", choices=DTYPES, default="float32")
    export.add_argument("--no-tf32", action="store_true", help="float32 is not rounded to TF32")
    export.add_argument(
        "--capability",
        type=capability,
        default=(9, 0),
        metavar="M.N",
        help="compute capability of the GPU that the file is for; default: 9.0",
    )
    export.add_argument("-o", "--output", metavar="FILE", help="the file to write; - is stdout")
    export.add_argument("--force", action="store_true", help="overwrite FILE")


def run(options: argparse.Namespace) -> int:
    from ..cli import FINE, UsageError, layer_given
    from . import write

    if options.source and layer_given(options):
        raise UsageError(f"give either {options.source} or a layer by options, not both")
    if not options.output:
        raise UsageError("say where to write: -o FILE, or -o - for stdout")
    rendered = _rendered(options)
    if options.output == "-":
        print(rendered.text, end="")
    else:
        path = write(rendered.text, Path(options.output), options.force)
        lines = rendered.text.count("\n")
        print(f"written: {path} ({rendered.kernel}, {options.dtype}, {lines} lines)")
    if rendered.note:
        print(f"upconv export: {rendered.note}", file=sys.stderr)
    return FINE


def _rendered(options: argparse.Namespace) -> Rendered:
    from ..cases import select
    from ..cli import UsageError, case_from_options
    from . import model_file
    from .layers import Layer, model_class
    from .render import Target, render

    source = options.source
    if source and (source.endswith(".py") or "/" in source or Path(source).exists()):
        if options.no_bias:
            raise UsageError("--no-bias is for a layer given by options; the file's Model decides")
        found = model_file.read(Path(source))
        layer, text, size = found.layer, found.model_class, found.input_size
        origin = f"Model in {Path(source).name}"
    else:
        case = select([source])[0] if source else case_from_options(options)
        problem = case.problem(dtype=options.dtype, bias=not options.no_bias)
        layer = Layer.of_problem(problem)
        text, size = model_class(layer), (problem.batch, problem.in_channels, *problem.in_size)
        origin = f"the case {source}" if source else "options"
    target = Target(options.dtype, not options.no_tf32, options.capability)
    return render(layer, text, size, target, origin)
