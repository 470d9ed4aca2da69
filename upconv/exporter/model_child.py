"""Runs a file that defines Model, in a process of its own, and tells what it holds, as JSON.

Run by path: `python model_child.py FILE ANSWER.json`. A process of its own because the file may
print, exit, change torch's settings or crash. Models and inputs are made on the meta device, so
that the gigabytes of a benchmark's input are never allocated.
"""

import contextlib
import importlib.util
import inspect
import io
import json
import os
import sys
from typing import Any

NEEDED = ("Model", "get_inputs", "get_init_inputs")
LAYERS = ("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
LITERALS = (bool, int, float, str, type(None))


class Unfit(Exception):
    """The file cannot be exported; the text says why."""


def literal(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(literal(part) for part in value)
    return type(value) in LITERALS


def attempt(what: str, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except BaseException as error:
        raise Unfit(f"{what} failed with {type(error).__name__}: {error}") from error


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("exported_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    attempt("running the file", spec.loader.exec_module, module)
    missing = [name for name in NEEDED if not callable(getattr(module, name, None))]
    if missing:
        raise Unfit(f"it must define {', '.join(NEEDED)}; missing: {', '.join(missing)}")
    return module


def the_layer(model: Any) -> tuple[str, Any]:
    """The one layer of a model, and its name there."""
    from torch import nn

    kinds = [getattr(nn, name) for name in LAYERS]
    inner = [(name, part) for name, part in model.named_modules() if name]
    listed = ", ".join(f"{name} ({type(part).__name__})" for name, part in inner) or "nothing"
    if len(inner) != 1 or type(inner[0][1]) not in kinds:
        raise Unfit(
            f"Model must hold one nn.ConvTranspose1d/2d/3d and nothing else; holds {listed}"
        )
    again = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    if len(again) > 1:
        raise Unfit(
            f"Model holds its layer under {len(again)} names ({', '.join(again)}); a state_dict "
            "has its parameters under each of them; give it one name"
        )
    own = [*model._parameters, *model._buffers]
    if own:
        raise Unfit(f"Model has parameters or buffers beside its layer: {', '.join(own)}")
    for part in (model, inner[0][1]):
        if any(getattr(part, hooks) for hooks in HOOKS) or "forward" in vars(part):
            raise Unfit("Model or its layer has hooks, which ModelNew would not have")
    return inner[0]


def as_written() -> dict[str, Any]:
    """What a file could put something else in the place of: PyTorch's layers and functions."""
    from torch import nn
    from torch.nn import functional

    found = {
        f"torch.nn.functional.{name}": getattr(functional, name)
        for name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    }
    kinds = {kind for layer in LAYERS for kind in getattr(nn, layer).__mro__ if kind is not object}
    for kind in kinds:
        for name, value in vars(kind).items():
            if callable(value):
                found[f"{kind.__module__}.{kind.__qualname__}.{name}"] = value
    return found


def methods_of(model_class: Any, path: str) -> dict[str, int]:
    """Where in the file each method of Model begins; 0: it was not written there.

    So is whatever else the class was given, by statements behind it.
    """
    lines = {}
    for name, value in vars(model_class).items():
        code = getattr(value, "__code__", None)
        if code is not None and code.co_filename == path:
            lines[name] = code.co_firstlineno
        elif code is not None or not (name.startswith("__") and name.endswith("__")):
            lines[name] = 0
    return lines


def describe(path: str) -> dict[str, Any]:
    import torch
    from torch import nn

    before = as_written()
    module = load(path)
    after = as_written()
    changed = [name for name in after if after[name] is not before.get(name)]
    if changed:
        raise Unfit(f"the file replaces {', '.join(changed)}, which ModelNew would not do")
    if module.Model.__bases__ != (nn.Module,):
        raise Unfit(f"Model must derive from nn.Module, its bases are {module.Model.__bases__}")
    initial = attempt("get_init_inputs()", module.get_init_inputs)
    with torch.device("meta"):
        model = attempt("Model(*get_init_inputs())", lambda: module.Model(*initial))
        inputs = attempt("get_inputs()", module.get_inputs)
    name, layer = the_layer(model)
    if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
        raise Unfit(f"get_inputs() must return a list of one tensor, got {len(inputs)} things")
    with torch.device("meta"), torch.no_grad():
        attempt("Model's forward on get_inputs()", model, inputs[0].to("meta"))
    defaults = {}
    for parameter in inspect.signature(module.Model).parameters.values():
        if parameter.default is not parameter.empty:
            if not literal(parameter.default):
                raise Unfit(f"the default of {parameter.name} is not a plain number or tuple")
            defaults[parameter.name] = repr(parameter.default)
    return {
        "name": name,
        "class": type(layer).__name__,
        "layer": {
            "in_channels": layer.in_channels,
            "out_channels": layer.out_channels,
            "kernel_size": layer.kernel_size,
            "stride": layer.stride,
            "padding": layer.padding,
            "output_padding": layer.output_padding,
            "groups": layer.groups,
            "bias": layer.bias is not None,
            "dilation": layer.dilation,
        },
        "input_size": list(inputs[0].shape),
        "defaults": defaults,
        # By the module's own name of its file: `path` may be seen from the current folder.
        "methods": methods_of(module.Model, str(module.__file__)),
        "globals": {key: repr(value) for key, value in vars(module).items() if literal(value)},
    }


def main() -> None:
    path, answer = sys.argv[1:]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = describe(path)
    except Unfit as error:
        found = {"unfit": str(error)}
    with open(answer, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
