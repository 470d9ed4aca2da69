"""A layer as the exporter takes it, whether it came from options, from a module or from a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..planner import Problem
from .errors import ExportError

if TYPE_CHECKING:
    from torch import nn

ARGUMENTS = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "bias",
    "dilation",
)
"""What a layer is made with, in the order of PyTorch's constructor."""


@dataclass(frozen=True)
class Layer:
    """An nn.ConvTransposeNd with its sizes for every dimension."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    bias: bool
    dilation: tuple[int, ...]

    @property
    def class_name(self) -> str:
        return f"ConvTranspose{len(self.kernel_size)}d"

    def __str__(self) -> str:
        """As one would write it."""
        values: dict[str, Any] = {name: _short(getattr(self, name)) for name in ARGUMENTS}
        usual = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
        shown = [f"{values[name]}" for name in ARGUMENTS[:3]]
        shown += [f"{name}={values[name]}" for name in usual if values[name] != usual[name]]
        return f"{self.class_name}({', '.join(shown)}{'' if self.bias else ', bias=False'})"

    def problem(self, input_size: tuple[int, ...], dtype: str, tf32: bool = True) -> Problem:
        """The layer on an input of (N, C, *spatial), as the planner sees it."""
        if len(input_size) != len(self.kernel_size) + 2 or input_size[1] != self.in_channels:
            raise ExportError(
                f"the input of {self} has {len(self.kernel_size) + 2} sizes, the second of them "
                f"{self.in_channels}; got {', '.join(map(str, input_size)) or 'nothing'}"
            )
        return Problem(
            batch=input_size[0],
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            in_size=tuple(input_size[2:]),
            kernel=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            dilation=self.dilation,
            groups=self.groups,
            bias=self.bias,
            dtype=dtype,
            tf32=tf32 and dtype == "float32",
        )

    @staticmethod
    def of_problem(problem: Problem) -> Layer:
        return Layer(
            problem.in_channels,
            problem.out_channels,
            problem.kernel,
            problem.stride,
            problem.padding,
            problem.output_padding,
            problem.groups,
            problem.bias,
            problem.dilation,
        )

    @staticmethod
    def of_module(module: nn.Module) -> Layer:
        """ExportError for anything that is not one of PyTorch's three layers, or upconv's."""
        from torch.nn.modules.conv import _ConvTransposeNd
        from torch.nn.modules.lazy import LazyModuleMixin

        if not isinstance(module, _ConvTransposeNd) or isinstance(module, LazyModuleMixin):
            raise ExportError(
                "export takes an nn.ConvTranspose1d/2d/3d whose sizes are known, "
                f"got {type(module).__name__}"
            )
        reason = _why_more(module)
        if reason:
            raise ExportError(f"what is written is a plain layer, and this one does more: {reason}")
        if not all(isinstance(padding, int) for padding in module.padding):
            raise ExportError(f"{module}: PyTorch computes no such padding")
        return Layer(
            module.in_channels,
            module.out_channels,
            tuple(module.kernel_size),
            tuple(module.stride),
            tuple(int(padding) for padding in module.padding),
            tuple(module.output_padding),
            module.groups,
            module.bias is not None,
            tuple(module.dilation),
        )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _why_more(module: nn.Module) -> str:
    """Why a layer does more than its class and its sizes say; empty: it does not."""
    from torch.nn.utils import parametrize

    from ..swap import why_different

    if parametrize.is_parametrized(module):
        names = ", ".join(module.parametrizations)  # type: ignore[arg-type]
        return (
            f"has parametrizations ({names}); remove them first, by "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    reason = why_different(module, type(module))
    if not reason and any(getattr(module, hooks) for hooks in _HOOKS):
        return "has hooks (weight_norm and pruning work by them too): remove them first"
    return reason


def _short(value: Any) -> Any:
    """3 for (3, 3)."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def model_class(layer: Layer) -> str:
    """ModelNew as a layer: PyTorch's own class, its constructor with this layer's values."""
    values = [f"{name}={_short(getattr(layer, name))!r}" for name in ARGUMENTS]
    rest = ["padding_mode='zeros'", "device=None", "dtype=None"]
    names = [argument.split("=")[0] for argument in [*values, *rest]]
    return "\n".join(
        [
            f"class ModelNew(_nn.{layer.class_name}):",
            '    """PyTorch\'s layer, its constructor and parameters, with another forward."""',
            "",
            "    def __init__(",
            "        self,",
            *[f"        {argument}," for argument in [*values, *rest]],
            "    ):",
            "        super().__init__(",
            *[f"            {name}," for name in names],
            "        )",
            "",
            "    def forward(self, x: torch.Tensor) -> torch.Tensor:",
            "        return _conv_transpose(x, self)",
        ]
    )
