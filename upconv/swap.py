"""`accelerate` and `restore`: PyTorch's transposed convolutions in a model for ours, and back.

Only the class of a layer is changed, in place: parameters, hooks, names, and what optimizers and
compiled models refer to stay the same objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils import parametrize

from .modules import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, make_leaf, unmake_leaf

_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose3d: ConvTranspose3d,
}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}

_MARK = "_upconv_swapped"
"""In the `__dict__` of a swapped layer, so that copies of it can be restored as well."""
_BEFORE = "_upconv_before"
"""In a rebuilt class of a parametrized layer: the class it was rebuilt from."""
_NAMES = tuple(theirs.__name__ for theirs in _OURS)


@dataclass(frozen=True)
class Swapped:
    name: str
    """Dotted name in the model; empty for the model itself."""
    layer: str
    """The layer as PyTorch prints it, on one line."""


@dataclass(frozen=True)
class Left:
    name: str
    layer: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What `accelerate` or `restore` did to every transposed convolution of a model; prints."""

    verb: str
    swapped: list[Swapped] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def __str__(self) -> str:
        plural = "layer" if len(self.swapped) == 1 else "layers"
        lines = [f"upconv: {len(self.swapped)} {plural} {self.verb}, {len(self.left)} left"]
        names = [entry.name for entry in self.swapped] + [entry.name for entry in self.left]
        width = max(map(len, names), default=0)
        for entry in self.swapped:
            lines.append(f"  {self.verb:11}{entry.name:{width}}  {entry.layer}")
        for other in self.left:
            lines.append(f"  {'left':11}{other.name:{width}}  {other.layer}: {other.reason}")
        return "\n".join(lines)


def accelerate(model: nn.Module) -> Report:
    """Let upconv run every transposed convolution of a model. In place; `restore` undoes it.

    Layers of PyTorch's own three classes are swapped, parametrized ones (weight_norm,
    spectral_norm) included. Subclasses, lazy, quantized and scripted layers are left as they are;
    the report says which and why.
    """
    report = Report("swapped")
    for name, layer in _transposed(model):
        reason = _reason_to_leave(layer)
        if reason:
            report.left.append(Left(name, _title(layer), reason))
            continue
        kind = type(layer)
        if kind in _OURS:
            layer.__class__ = _OURS[kind]
        else:
            assert kind.__base__ is not None
            layer.__class__ = _rebuilt(kind, _OURS[kind.__base__], before=kind)
        layer.__dict__[_MARK] = True
        make_leaf(layer)
        report.swapped.append(Swapped(name, _title(layer)))
    return report


def restore(model: nn.Module) -> Report:
    """Undo `accelerate`: every layer it swapped gets back exactly the class it had.

    Layers that were made as upconv's own are left alone.
    """
    report = Report("restored")
    for name, layer in _transposed(model):
        kind = type(layer)
        ours = kind if kind in _THEIRS else kind.__base__
        if not layer.__dict__.get(_MARK) or ours not in _THEIRS:
            if isinstance(layer, tuple(_THEIRS)):
                reason = "was not swapped by accelerate"
                if layer.__dict__.get(_MARK):
                    reason = (
                        f"was swapped, and is a {kind.__module__}.{kind.__qualname__} since then "
                        "(fully_shard does that): call restore before wrapping"
                    )
                report.left.append(Left(name, _title(layer), reason))
            continue
        layer.__class__ = _THEIRS[kind] if kind in _THEIRS else _class_before(kind)
        del layer.__dict__[_MARK]
        unmake_leaf(layer)
        report.swapped.append(Swapped(name, _title(layer)))
    return report


def _transposed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Everything that is, or claims to be, a transposed convolution; shared layers once."""
    for name, layer in model.named_modules():
        names = [kind.__name__ for kind in type(layer).__mro__]
        names.append(getattr(layer, "original_name", ""))
        if isinstance(layer, _ConvTransposeNd) or any(n.endswith(_NAMES) for n in names):
            yield name, layer


def _reason_to_leave(layer: nn.Module) -> str:
    if isinstance(layer, tuple(_THEIRS)):
        return "runs by upconv already"
    base = type(layer).__base__
    parametrized = base in _OURS and parametrize.is_parametrized(layer)
    return why_different(layer, base if parametrized and base is not None else type(layer))


def why_different(layer: nn.Module, kind: type[nn.Module]) -> str:
    """Why a layer of class `kind` may compute something else than PyTorch's; empty: it does not."""
    if hasattr(layer, "original_name"):
        return "compiled by TorchScript: call accelerate before scripting"
    if "forward" in layer.__dict__:
        return "has a forward of its own, set on the instance"
    if kind in _OURS or kind in _THEIRS:
        return ""
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return "lazy: call the model once, so that it becomes an ordinary layer, and again this"
    if "quantized" in kind.__module__:
        return "quantized"
    return f"{kind.__module__}.{kind.__qualname__} is a class of its own; its forward may differ"


def _rebuilt(kind: type, base: type, before: type | None = None) -> type:
    """The generated class of a parametrized layer, on another base.

    PyTorch keeps the parametrized tensors as properties of a class made for this one layer.
    """
    members = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    members.pop(_BEFORE, None)
    if before is not None:
        members[_BEFORE] = before
    return type(kind.__name__, (base,), members)


def _class_before(kind: type) -> type:
    """The very class that was rebuilt, unless parametrizations came or went since."""
    before: type | None = vars(kind).get(_BEFORE)
    if before is not None and _properties(before) == _properties(kind):
        return before
    assert kind.__base__ is not None
    return _rebuilt(kind, _THEIRS[kind.__base__])


def _properties(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if isinstance(value, property)}


def _title(layer: nn.Module) -> str:
    """Its repr without the parts, which would be a line each; of a layer that has one."""
    name = type(layer).__name__
    try:
        return f"{name}({' '.join(layer.extra_repr().split())})"
    except Exception:  # attributes that were changed by hand: to be run all the same
        return name
