"""The `upconv` command. Exit codes: 0 fine, 1 a check failed, 2 bad usage, 130 stopped.

Parsing and printing only. What the commands do is in `doctor`, `explain`, `bench`, `draw` and
`jit`, imported by the command that needs it, so that `doctor` runs where torch does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .contenders import KEYS
from .exporter.command import add_parser as add_export_parser
from .libraries import KINDS
from .version import __version__

if TYPE_CHECKING:
    from .cases import Case

MOST = (1 << 63) - 1
FINE, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130
DTYPES = ("float32", "float64", "bfloat16", "float16")
BENCH_DTYPES = ("tf32", *DTYPES)
LAYOUTS = ("contiguous", "channels_last")


class UsageError(Exception):
    """What was asked for makes no sense; the text says why and what would."""


def whole(text: str) -> int:
    """Reads a whole number that PyTorch can."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
    if abs(value) > MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]} is beyond PyTorch's numbers, up to 2^63 - 1")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Reads 3, 3,5 or 3x5."""
    parts = text.replace("x", ",").split(",")
    try:
        found = tuple(map(int, parts))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a list of whole numbers such as 3 or 3,5"
        ) from None
    for part in parts:
        whole(part)
    return found


def some_of(choices: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads a list such as default,compile."""
    known = tuple(choices)

    def read(text: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(text.split(",")))
        unknown = [word for word in words if word not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return words

    return read


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    layer = parser.add_argument_group(
        "the layer", "as nn.ConvTransposeNd takes it; 3 stands for all dimensions, 3,5 for each"
    )
    layer.add_argument("--in-channels", type=whole, metavar="N")
    layer.add_argument("--out-channels", type=whole, metavar="N")
    layer.add_argument("--kernel", type=sizes, metavar="K")
    layer.add_argument("--stride", type=sizes, default=(1,), metavar="S")
    layer.add_argument("--padding", type=sizes, default=(0,), metavar="P")
    layer.add_argument("--output-padding", type=sizes, default=(0,), metavar="OP")
    layer.add_argument("--dilation", type=sizes, default=(1,), metavar="D")
    layer.add_argument("--groups", type=whole, default=1, metavar="G")
    layer.add_argument(
        "--input", type=sizes, metavar="SHAPE", help="8,64,32,32 (N,C,H,W) or 32,32 (H,W)"
    )
    layer.add_argument(
        "--dims", type=int, choices=(1, 2, 3), help="spatial dimensions, where --input leaves doubt"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="upconv", description="Transposed convolutions for PyTorch, and what runs them."
    )
    parser.add_argument("--version", action="version", version=f"upconv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    doctor = commands.add_parser(
        "doctor",
        help="what this machine has, and whether upconv works",
        description="What this machine has, what will run on it and why, and a self-test.",
        epilog="Exit code 0: upconv's kernels are there and right, or nobody asked for them "
        "(UPCONV_BACKEND=aten, a system they are not made for). 1: something is to be mended; that "
        "is also so where PyTorch's operator runs since a library cannot be built or loaded.",
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument(
        "--no-self-test", action="store_true", help="look only: build and compute nothing"
    )

    explain = commands.add_parser("explain", help="the plan of a layer: phases, taps, kernel, why")
    explain.add_argument("case", nargs="?", help="a built-in case such as kb69, instead of options")
    add_layer_options(explain)
    explain.add_argument("--no-bias", action="store_true")
    explain.add_argument("--dtype", choices=DTYPES, default="float32")
    explain.add_argument("--no-tf32", action="store_true", help="GPU: float32 stays float32")
    explain.add_argument("--channels-last", action="store_true")
    explain.add_argument(
        "--device",
        choices=("this", "cpu", "h200"),
        default="this",
        help="this: the GPU of this machine, else its CPU; h200 needs none to plan for",
    )
    explain.add_argument("--draw", metavar="FILE", help="draw the phases: FILE.svg or FILE.png")
    explain.add_argument("--json", action="store_true", help="print the plan as JSON")

    add_bench_parser(commands)
    add_report_parser(commands)
    add_verify_parser(commands)
    add_export_parser(commands, add_layer_options)

    build = commands.add_parser("build", help="build the compiled libraries ahead of time")
    build.add_argument("kind", nargs="*", help=f"{', '.join(KINDS)}; default: all of use here")

    cache = commands.add_parser("cache", help="show or clear the build cache")
    cache.add_argument("action", nargs="?", choices=("show", "clear"), default="show")
    cache.add_argument("--json", action="store_true", help="show: print as JSON")
    return parser


def add_bench_parser(commands: Any) -> None:
    bench = commands.add_parser("bench", help="check and time upconv against PyTorch")
    bench.add_argument(
        "cases", nargs="*", metavar="CASE", help="names or patterns ('kb*'); without: all cases"
    )
    add_layer_options(bench)
    bench.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    bench.add_argument(
        "--dtype",
        type=some_of(BENCH_DTYPES),
        metavar="DTYPES",
        help=f"of {','.join(BENCH_DTYPES)}; on a GPU float32 is strict and tf32 the default",
    )
    bench.add_argument(
        "--layout",
        type=some_of(LAYOUTS),
        default=LAYOUTS[:1],
        metavar="LAYOUTS",
        help=f"of input and output: {','.join(LAYOUTS)}; default: {LAYOUTS[0]}",
    )
    bench.add_argument(
        "--direction",
        choices=("forward", "backward", "both"),
        default="forward",
        help="backward: the gradients of input, weight and bias",
    )
    bench.add_argument("--threads", type=whole, help="CPU threads; default: what torch takes")
    bench.add_argument(
        "--seconds", type=float, default=4.0, help="time for the timed calls of one case"
    )
    bench.add_argument("--batch", type=whole, metavar="N", help="instead of each case's own")
    bench.add_argument(
        "--against",
        type=some_of(KEYS),
        default=("default",),
        metavar="WAYS",
        help=f"ways of calling PyTorch, the fastest of which counts: {','.join(KEYS)}",
    )
    files = bench.add_argument_group("files")
    files.add_argument("--out", metavar="FILE", help="write the results as JSON, case by case")
    files.add_argument("--resume", action="store_true", help="go on with the file of --out")
    files.add_argument(
        "--force", action="store_true", help="overwrite the files of --out and --csv"
    )
    files.add_argument("--csv", metavar="FILE", help="write the results as CSV, a line a case")
    files.add_argument(
        "--compare", metavar="OLD", help="show what got slower than in OLD; if any, exit code 1"
    )
    files.add_argument(
        "--commit", metavar="ID", help="what is measured, in a copy where git cannot tell"
    )
    files.add_argument("--results", metavar="FILE", help="take FILE's results, measure nothing")
    bench.add_argument("--markdown", action="store_true", help="print the table as markdown")
    bench.add_argument("--list", action="store_true", help="list the built-in cases")


def add_report_parser(commands: Any) -> None:
    report = commands.add_parser("report", help="make a page of what bench measured")
    report.add_argument("files", nargs="+", metavar="RESULTS", help="files of bench --out")
    report.add_argument("-o", "--out", metavar="FILE", default="report.html", help="%(default)s")


def add_verify_parser(commands: Any) -> None:
    verify = commands.add_parser("verify", help="compare drawn configurations with float64")
    verify.add_argument("--seconds", type=float, metavar="S", help="how long; default: 30")
    verify.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    verify.add_argument("--seed", type=whole, metavar="N", help="of the draws; default: a new one")
    verify.add_argument("--dtype", choices=DTYPES, help="default: all four in turn")
    verify.add_argument(
        "--kernel", metavar="NAME", help="auto: the planner's choice; default: it and every kernel"
    )
    verify.add_argument("--problem", metavar="JSON", help="this one, as a mismatch prints it")
    verify.add_argument("--json", action="store_true", help="print the report as JSON")


def case_from_options(options: argparse.Namespace) -> Case:
    """The layer that the options describe; ValueError or UsageError where they do not fit."""
    from .cases import Case
    from .explain import split_shape

    given = {"--in-channels": options.in_channels, "--out-channels": options.out_channels}
    given |= {"--kernel": options.kernel, "--input": options.input}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise UsageError(
            f"a layer needs {', '.join(given)}; missing: {', '.join(missing)}. "
            "`upconv bench --list` names the built-in cases"
        )
    ndim = dimensions_of(options)
    batch, channels, in_size = split_shape(options.input, ndim, options.in_channels)
    if channels != options.in_channels:
        raise UsageError(
            f"--input has {channels} channels, --in-channels says {options.in_channels}"
        )

    def each(name: str) -> tuple[int, ...]:
        values: tuple[int, ...] = getattr(options, name)
        if len(values) not in (1, ndim):
            flag = "--" + name.replace("_", "-")
            given = ",".join(map(str, values))
            raise UsageError(f"{flag} takes one value or {ndim} of them, got {given}")
        return values * ndim if len(values) == 1 else values

    return Case(
        "layer",
        batch,
        channels,
        options.out_channels,
        in_size,
        each("kernel"),
        each("stride"),
        each("padding"),
        each("output_padding"),
        each("dilation"),
        options.groups,
    )


def dimensions_of(options: argparse.Namespace) -> int:
    """1, 2 or 3: as said, as the kernel says, or as the length of the input shape says.

    Three numbers are N,C,L where the second is the number of channels, and D,H,W elsewhere.
    """
    if options.dims:
        return int(options.dims)
    for name in ("kernel", "stride", "padding", "output_padding", "dilation"):
        if len(getattr(options, name)) > 1:
            return len(getattr(options, name))
    length = len(options.input)
    if length == 3:
        return 1 if options.input[1] == options.in_channels else 3
    if length > 5:
        raise UsageError(f"--input has {length} sizes; N,C,D,H,W are the most there can be")
    return {1: 1, 2: 2, 4: 2, 5: 3}[length]


def layer_given(options: argparse.Namespace) -> bool:
    names = ("in_channels", "out_channels", "kernel", "input")
    return any(getattr(options, name) is not None for name in names)


def run_doctor(options: argparse.Namespace) -> int:
    from . import doctor

    report = doctor.examine(self_test=not options.no_self_test)
    bad = doctor.failures(report)
    if options.json:
        print(json.dumps(report | {"failures": bad}, indent=1, default=str))
    else:
        print(doctor.render(report))
    return FAILED if bad else FINE


def run_explain(options: argparse.Namespace) -> int:
    from .cases import select
    from .explain import check, explanation_of, hardware_named

    if options.case and layer_given(options):
        raise UsageError(f"give either the case {options.case} or a layer by options, not both")
    case = select([options.case])[0] if options.case else case_from_options(options)
    machine = hardware_named(options.device)
    problem = case.problem(
        dtype=options.dtype,
        channels_last=options.channels_last,
        tf32=machine.kind == "cuda" and options.dtype == "float32" and not options.no_tf32,
        bias=not options.no_bias,
    )
    check(problem)
    explanation = explanation_of(problem, machine, here=options.device != "h200")
    if options.draw:
        print(f"drawn: {explanation.draw(options.draw)}", file=sys.stderr)
    print(json.dumps(explanation.as_dict(), indent=1) if options.json else explanation)
    return FINE


def run_bench(options: argparse.Namespace) -> int:
    if options.list:
        from .cases import CASES

        for case in CASES:
            print(case.name)
        return FINE
    from .bench_command import run

    return run(options)


def run_report(options: argparse.Namespace) -> int:
    from .report import write_report

    print(f"written: {write_report(options.files, options.out)}", file=sys.stderr)
    return FINE


def run_verify(options: argparse.Namespace) -> int:
    from .verify import command

    report = command(options)
    print(json.dumps(report.as_dict(), indent=1) if options.json else report)
    if report.mismatch:
        return FAILED
    return INTERRUPTED if report.interrupted else FINE


def run_export(options: argparse.Namespace) -> int:
    from .exporter.command import run

    return run(options)


def run_build(options: argparse.Namespace) -> int:
    from .jit import prebuild

    unknown = [kind for kind in options.kind if kind not in KINDS]
    if unknown:
        raise UsageError(f"there is no library {unknown[0]!r}; choose from {', '.join(KINDS)}")
    if not options.kind:
        from .doctor import kinds

        options.kind = kinds()
    results = prebuild(options.kind)
    for result in results:
        if result.ok:
            how = "built" if result.built else "was there already"
            print(f"{result.kind}: {how} ({result.seconds:.1f} s): {result.path}")
        else:
            print(f"{result.kind}: {result.reason}")
    return FINE if all(result.ok for result in results) else FAILED


def run_cache(options: argparse.Namespace) -> int:
    from . import doctor, jit
    from .jit.folder import FolderUnusable

    if options.action == "clear":
        try:
            removed = jit.clear()
        except (OSError, FolderUnusable) as error:
            print(f"upconv cache: the builds cannot all be removed: {error}", file=sys.stderr)
            return FAILED
        print(f"removed {removed} build{'s' * (removed != 1)} from {jit.cache_state().folder}")
        return FINE
    found = doctor.cache()
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(doctor.render_section("cache", found))
    return FINE


COMMANDS = {
    "doctor": run_doctor,
    "explain": run_explain,
    "bench": run_bench,
    "report": run_report,
    "verify": run_verify,
    "export": run_export,
    "build": run_build,
    "cache": run_cache,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        code = COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except (UsageError, ValueError) as error:
        print(f"upconv {options.command}: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print(f"upconv {options.command}: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our pipe has left (`upconv explain ... | head`): no more to say to anyone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
