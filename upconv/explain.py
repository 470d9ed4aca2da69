"""`explain`: the plan of a layer in words. What is computed, by which kernel, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, prod
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from . import env, libraries, plans
from .planner import (
    ATEN,
    DIRECTIONS,
    ELEMENT_BYTES,
    H200,
    MOST_PHASES,
    Hardware,
    Phase,
    Plan,
    Problem,
    make_plan,
)
from .recording import why_pytorchs

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.modules.conv import _ConvTransposeNd

AXES = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
"""What the spatial dimensions are called, by how many there are."""

ANY_GRADIENT = "any gradient"
LINE_WIDTH = 100
MOST_PHASES_LISTED = 16
"""Beyond this the products are counted, not listed: stride 8 in 2-D has 64 of them."""
MOST_PHASES_OF_AXIS = 64
MOST_TAPS_LISTED = 256
"""Beyond these the first are listed, and the others counted."""


@dataclass(frozen=True)
class Explanation:
    """A plan that prints itself. `plan` is the value; `str()` the text; `draw()` the picture."""

    plan: Plan
    overruled: str = ""
    """The UPCONV_* setting that makes PyTorch's operator run whatever the plan says, if any."""
    gradients: tuple[Plan, ...] = ()
    """The plans of grad_input and grad_weight."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Directions whose library is not to be had here, and why; PyTorch's operator runs."""
    recorded: Mapping[str, str] = field(default_factory=dict)
    """Gradients that PyTorch's function records, forward pass included, where they are wanted; and
    why it does."""

    @property
    def problem(self) -> Problem:
        return self.plan.problem

    @property
    def kernel(self) -> str:
        """Name of the kernel that runs; "aten" is PyTorch's own operator.

        A call that records gradients may take PyTorch's all the same: `recorded` says which do.
        """
        return self.runs(self.plan)

    def runs(self, plan: Plan) -> str:
        """The kernel that runs for one of the plans."""
        return ATEN if self.why_not(plan) else plan.kernel

    def why_not(self, plan: Plan) -> str:
        """Why PyTorch's operator runs whatever a plan says; empty where it does not."""
        return self.overruled or self.missing.get(plan.problem.direction, "")

    @property
    def refused(self) -> dict[str, str]:
        """Every other kernel, and why it was not taken."""
        return {refusal.kernel: refusal.reason for refusal in self.plan.refused}

    @property
    def intensity(self) -> float:
        """FLOPs per byte of the least traffic."""
        return self.problem.flops / max(1, self.problem.bytes)

    @property
    def waste_of_zeros(self) -> float:
        """How many times the work, if zeros were put between the inputs and convolved over."""
        outputs = self.problem.batch * prod(self.problem.out_size)
        inputs = self.problem.batch * prod(self.problem.in_size)
        return outputs / max(1, inputs)

    def draw(self, path: str | Path) -> Path:
        """The phase picture, written as SVG or PNG by the name's ending. Needs matplotlib."""
        from .draw import draw

        return draw(self.problem, path)

    def as_dict(self) -> dict[str, Any]:
        """Everything `str()` says, for machines."""
        chosen = self.plan.chosen
        return {
            "problem": asdict(self.problem) | {"out_size": self.problem.out_size},
            "hardware": asdict(self.plan.hardware),
            "flops": self.problem.flops,
            "bytes": self.problem.bytes,
            "flops_per_byte": self.intensity,
            "waste_of_zeros": self.waste_of_zeros,
            "phases": [[asdict(phase) for phase in dimension] for dimension in self.plan.phases],
            "kernel": self.kernel,
            "overruled": self.overruled,
            "missing": dict(self.missing),
            "recorded_by_pytorch": dict(self.recorded),
            "expected_us": chosen.microseconds if isfinite(chosen.microseconds) else None,
            "notes": list(chosen.notes),
            "refused": self.refused,
            "gradients": {
                plan.problem.direction: {
                    "kernel": self.runs(plan),
                    "notes": list(plan.chosen.notes),
                    "refused": {refusal.kernel: refusal.reason for refusal in plan.refused},
                }
                for plan in self.gradients
            },
        }

    def __str__(self) -> str:
        return "\n\n".join(
            "\n".join(lines)
            for lines in (
                _headline(self.plan),
                _work(self),
                _phase_lines(self.plan),
                _kernel_lines(self),
                _gradient_lines(self),
            )
            if lines
        )


def explain(
    layer_or_problem: _ConvTransposeNd | Problem,
    input_shape: Tensor | Sequence[int] | None = None,
    *,
    hardware: Hardware | None = None,
) -> Explanation:
    """How upconv would run a layer, without running it.

    An `nn.ConvTranspose1d/2d/3d` (upconv's or PyTorch's) comes with the shape of its input,
    (N, C, *spatial), (C, *spatial) or (*spatial), or with the input itself; a `Problem` needs
    neither. `hardware` is where it would run: by default the layer's own device, and for a
    `Problem` the GPU of this machine, or its CPU where there is none.
    """
    if isinstance(layer_or_problem, Problem):
        if input_shape is not None:
            raise ValueError("a Problem holds its sizes already: explain(problem) takes no input")
        problem, machine = layer_or_problem, hardware or this_hardware()
    else:
        problem = _problem_of_layer(layer_or_problem, input_shape)
        machine = hardware or this_hardware(str(layer_or_problem.weight.device))
        if problem.dtype == "float32" and machine.kind == "cuda":
            problem = replace(problem, tf32=tf32_allowed())
    check(problem)
    return explanation_of(problem, machine, here=hardware is None)


def explanation_of(problem: Problem, machine: Hardware, here: bool) -> Explanation:
    """The plan as it would run; on this machine (`here`) the UPCONV_* variables have their say."""
    overruled = "UPCONV_BACKEND=aten" if here and env.settings().backend == "aten" else ""
    forced = plans.forced_kernel() if here else None
    plan, *gradients = (
        make_plan(replace(problem, direction=direction), machine, forced)
        for direction in DIRECTIONS
    )
    missing = {
        each.problem.direction: reason
        for each in (plan, *gradients)
        if here and (reason := _why_missing(each))
    }
    recorded = {}
    if not overruled and plan.problem.direction not in missing:
        recorded = _recorded(plan, gradients, here, forced is not None)
    return Explanation(plan, overruled, tuple(gradients), missing, recorded)


def _why_missing(plan: Plan) -> str:
    if plan.kernel == ATEN:
        return ""
    return libraries.why_missing(plan.hardware.kind, plan.kernel, plan.problem)


def _recorded(plan: Plan, gradients: Sequence[Plan], here: bool, forced: bool) -> dict[str, str]:
    """Which gradients PyTorch's function records, and why; see recording.py."""
    if plan.hardware.kind == "cpu":
        if plan.kernel == ATEN or (here and _pytorch_errs(plan.problem)):
            return {}
        reason = why_pytorchs([plan])
        return {ANY_GRADIENT: reason} if reason else {}
    by_input, by_weight = gradients
    found = {}
    for wanted in ([by_input, by_weight], [by_input], [by_weight]):
        if reason := why_pytorchs([plan, *wanted], forced):
            found[" and ".join(each.problem.direction for each in wanted)] = reason
    if all(each.kernel == ATEN for each in (plan, *gradients)):
        return {}
    return {ANY_GRADIENT: next(iter(found.values()))} if len(found) == 3 else found


def _pytorch_errs(problem: Problem) -> bool:
    import torch

    from .autograd import pytorch_errs

    return pytorch_errs(torch.empty(0, dtype=getattr(torch, problem.dtype)))


def check(problem: Problem) -> None:
    """ValueError in words for a problem that no transposed convolution has."""
    least: tuple[tuple[str, int, tuple[int, ...]], ...] = (
        ("in_channels", 1, (problem.in_channels,)),
        ("out_channels", 1, (problem.out_channels,)),
        ("groups", 1, (problem.groups,)),
        ("input size", 1, problem.in_size),
        ("kernel", 1, problem.kernel),
        ("stride", 1, problem.stride),
        ("dilation", 1, problem.dilation),
        ("batch", 0, (problem.batch,)),
        ("padding", 0, problem.padding),
        ("output_padding", 0, problem.output_padding),
    )
    for name, bound, values in least:
        if min(values) < bound:
            raise ValueError(f"{name} must be at least {bound}, got {_numbers(values)}")
    for name in ("kernel", "stride", "padding", "output_padding", "dilation"):
        if len(getattr(problem, name)) != problem.ndim:
            given = getattr(problem, name)
            raise ValueError(f"{name} needs one or {problem.ndim} values, got {_numbers(given)}")
    if problem.dtype not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise ValueError(f"there are plans for {known}; {problem.dtype} is left to PyTorch")
    if max(problem.stride) > MOST_PHASES:
        given = _numbers(problem.stride)
        raise ValueError(
            f"there are plans for strides up to {MOST_PHASES}; {given} is left to PyTorch"
        )
    for name in ("in_channels", "out_channels"):
        if getattr(problem, name) % problem.groups:
            raise ValueError(
                f"{name} = {getattr(problem, name)} is not divisible by groups = {problem.groups}"
            )
    for extra, stride, dilation in zip(
        problem.output_padding, problem.stride, problem.dilation, strict=True
    ):
        if extra >= max(stride, dilation):
            raise ValueError(
                f"output_padding = {extra} must be smaller than stride = {stride} "
                f"or dilation = {dilation}"
            )
    if min(problem.out_size) < 1:
        raise ValueError(
            f"the output would be {_numbers(problem.out_size)}: less padding or a larger input"
        )


def this_hardware(device: str | None = None) -> Hardware:
    """This machine as the planner sees it; `device` as torch names it, by default the GPU."""
    import torch

    from . import plans

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return plans.hardware(torch.device(device))


def hardware_named(name: str) -> Hardware:
    """The `--device` of the command line: "cpu", "h200" (with or without one here), or "this"."""
    if name == "h200":
        return H200
    return this_hardware("cpu" if name == "cpu" else None)


def tf32_allowed() -> bool:
    from . import plans

    return plans.tf32_allowed()


def _problem_of_layer(layer: _ConvTransposeNd, input: Tensor | Sequence[int] | None) -> Problem:
    import torch
    from torch.nn.modules.conv import _ConvTransposeNd

    from . import plans

    if not isinstance(layer, _ConvTransposeNd):
        raise TypeError(
            "explain takes an nn.ConvTranspose1d/2d/3d or an upconv.planner.Problem, "
            f"got {type(layer).__name__}"
        )
    if input is None:
        raise ValueError("a layer needs an input as well: explain(layer, x) or (layer, shape)")
    tensor = input if isinstance(input, torch.Tensor) else None
    shape = tuple(tensor.shape if tensor is not None else input)
    ndim = len(layer.kernel_size)
    channels_last = tensor is not None and plans.channels_last(ndim, tensor, layer.weight)
    batch, channels, size = split_shape(shape, ndim, layer.in_channels)
    if channels != layer.in_channels:
        raise ValueError(f"the layer takes {layer.in_channels} channels, the input has {channels}")
    return Problem.of(
        batch,
        layer.in_channels,
        layer.out_channels,
        size,
        layer.kernel_size,
        layer.stride,
        tuple(int(p) for p in layer.padding),
        layer.output_padding,
        layer.dilation,
        layer.groups,
        bias=layer.bias is not None,
        dtype=str((tensor if tensor is not None else layer.weight).dtype).removeprefix("torch."),
        channels_last=channels_last,
    )


def split_shape(
    shape: tuple[int, ...], ndim: int, in_channels: int
) -> tuple[int, int, tuple[int, ...]]:
    """Batch, channels and spatial size of (N, C, *spatial), (C, *spatial) or (*spatial)."""
    if len(shape) == ndim + 2:
        return shape[0], shape[1], shape[2:]
    if len(shape) == ndim + 1:
        return 1, shape[0], shape[1:]
    if len(shape) == ndim:
        return 1, in_channels, shape
    raise ValueError(
        f"an input of {ndim} spatial dimensions has {ndim} sizes, with channels {ndim + 1}, "
        f"with batch and channels {ndim + 2}; got {_numbers(shape)}"
    )


def _numbers(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) if values else "nothing"


def shorthand(values: Sequence[int]) -> str:
    """3x5, or 3 where all are equal."""
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


def _scaled(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _headline(plan: Plan) -> list[str]:
    problem, machine = plan.problem, plan.hardware
    options = [
        f"kernel {'x'.join(map(str, problem.kernel))}",
        f"stride {shorthand(problem.stride)}",
    ]
    for name in ("padding", "output_padding", "dilation"):
        values = getattr(problem, name)
        if set(values) != {1 if name == "dilation" else 0}:
            options.append(f"{name} {shorthand(values)}")
    if problem.groups > 1:
        options.append(f"groups {problem.groups}")
    options.append("bias" if problem.bias else "no bias")
    where = machine.name or machine.kind
    if machine.kind == "cpu":
        where = f"{where} ({machine.isa}, {machine.threads} threads)"
    layout = "channels_last" if problem.channels_last else "contiguous"
    dtype = problem.dtype + (" (TF32 allowed)" if problem.tf32 else "")
    channels = f"{problem.in_channels} -> {problem.out_channels} channels"
    input_shape = (problem.batch, problem.in_channels, *problem.in_size)
    output_shape = (problem.batch, problem.out_channels, *problem.out_size)
    return [
        f"ConvTranspose{problem.ndim}d  {channels}, {', '.join(options)}",
        f"input ({_numbers(input_shape)}) -> output ({_numbers(output_shape)})",
        f"{dtype}, {layout}, on {where}",
    ]


def _work(explanation: Explanation) -> list[str]:
    problem = explanation.problem
    flops, traffic = _scaled(problem.flops, "FLOP"), _scaled(problem.bytes, "B")
    intensity = f"{explanation.intensity:.3g} FLOP per byte"
    lines = [f"work     {flops}, at least {traffic} moved, {intensity}"]
    if max(problem.stride) > 1 and explanation.waste_of_zeros > 1:
        lines.append(
            f"         putting zeros between the inputs would take "
            f"{explanation.waste_of_zeros:.2f} times as many products"
        )
    return lines


def reading(shift: int) -> str:
    """What a tap reads at output q of its phase."""
    return f"input[q{shift:+d}]" if shift else "input[q]"


def _outputs(phase: Phase, stride: int) -> str:
    shown = [phase.first + q * stride for q in range(min(3, phase.count))]
    dots = ", ..." if phase.count > len(shown) else ""
    return f"outputs {', '.join(map(str, shown))}{dots}"


def _phase_lines(plan: Plan) -> list[str]:
    problem = plan.problem
    counts = [len(dimension) for dimension in plan.phases]
    every = prod(counts)
    total = f"{' x '.join(map(str, counts))} = {every}" if len(counts) > 1 else str(every)
    lines = [f"phases   {total}; inside a phase, output number q always meets the same taps"]
    for axis, dimension, stride in zip(
        AXES[problem.ndim], plan.phases, problem.stride, strict=True
    ):
        lines += _axis_lines(axis, dimension, stride)
    if problem.ndim > 1:
        lines.append(f"  {'all':7}{_product_line(plan.phases)}")
        if 1 < every <= MOST_PHASES_LISTED:
            for first, taps in plan.phase_taps():
                names = " ".join("".join(f"[{tap.k}]" for tap in tap_nd) for tap_nd in taps)
                lines.append(f"         from output ({_numbers(first)}): {names or 'no tap'}")
    return lines


def _axis_lines(axis: str, phases: Sequence[Phase], stride: int) -> list[str]:
    """The phases of one dimension; the first of them where there are very many."""
    shown = phases[:MOST_PHASES_OF_AXIS]
    width = max((len(_outputs(phase, stride)) for phase in shown), default=0)
    lines = []
    for index, phase in enumerate(shown):
        terms = [f"tap[{tap.k}]*{reading(tap.shift)}" for tap in phase.taps[:MOST_TAPS_LISTED]]
        if len(phase.taps) > len(terms):
            terms.append(f"... ({len(phase.taps) - len(terms)} more taps)")
        start = f"  {'' if index else axis:7}{_outputs(phase, stride).ljust(width)}  = "
        lines += wrap(
            " + ".join(terms) or "no tap: bias alone",
            LINE_WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_on_hyphens=False,
        )
    if len(phases) > len(shown):
        lines.append(f"         and {len(phases) - len(shown)} more phases (--json has all)")
    return lines


def _product_line(phases: Sequence[Sequence[Phase]]) -> str:
    """How many taps the phases of all dimensions together have, without a look at each of them."""
    taps = [[len(phase.taps) for phase in dimension] for dimension in phases]
    every = prod(map(len, taps))
    empty = every - prod(sum(count > 0 for count in counts) for counts in taps)
    least, most = prod(map(min, taps)), prod(map(max, taps))
    each = f"{most} taps each" if least == most else f"{least} to {most} taps each"
    bare = f"; {empty} without any" if empty else ""
    return f"{every} phase{'s' * (every > 1)}, {each}{bare}"


def _planned(explanation: Explanation, plan: Plan, label: str) -> list[str]:
    """What runs; the plan with its notes, where something keeps it from running, too."""
    reason, microseconds = explanation.why_not(plan), plan.chosen.microseconds
    lines = []
    if reason and plan.kernel != ATEN:
        lines.append(f"{label}{ATEN}: PyTorch's operator runs, since {reason}")
        label = "planned".ljust(len(label))
    known = isfinite(microseconds) and microseconds > 0
    lines.append(f"{label}{plan.kernel}" + (f", {microseconds:.4g} us expected" if known else ""))
    return lines + [f"         - {note}" for note in plan.chosen.notes]


def _kernel_lines(explanation: Explanation) -> list[str]:
    plan = explanation.plan
    lines = _planned(explanation, plan, "kernel   ")
    for index, (gradients, reason) in enumerate(explanation.recorded.items()):
        label = "recorded" if index == 0 else ""
        lines.append(f"{label:9}{gradients}: PyTorch's operator runs, since {reason}")
    for index, refusal in enumerate(plan.refused):
        label = "refused" if index == 0 else ""
        lines.append(f"{label:9}{refusal.kernel}: {refusal.reason}")
    return lines


def _gradient_lines(explanation: Explanation) -> list[str]:
    """What the gradients use: kernel, expected time, and the notes, which state the workspace."""
    return [
        line
        for plan in explanation.gradients
        for line in _planned(explanation, plan, f"{plan.problem.direction:13}")
    ]
