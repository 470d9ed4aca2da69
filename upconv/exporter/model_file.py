"""A file that defines Model, get_inputs and get_init_inputs: what layer it holds, and ModelNew.

The file is run (in a process of its own) to learn the layer's sizes, and read to copy the
constructor. ModelNew gets the same arguments and makes the same layer from them. A Model that does
anything beside calling that one layer is refused: ModelNew would leave it out.
"""

from __future__ import annotations

import ast
import builtins
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from .errors import ExportError
from .layers import Layer

CHILD = Path(__file__).with_name("model_child.py")
TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class ModelFile:
    layer: Layer
    input_size: tuple[int, ...]
    model_class: str
    """ModelNew, as Python."""


def read(path: Path) -> ModelFile:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ExportError(f"{path} {what}; give a Python file that defines Model")
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ExportError(f"{path} is not Python: {error}") from None
    found = _run(path)
    sizes: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found["layer"].items()
    }
    layer, input_size = Layer(**sizes), tuple(found["input_size"])
    if len(input_size) == len(layer.kernel_size) + 1:
        input_size = (1, *input_size)
    try:
        layer.problem(input_size, "float32")  # the meta device lets wrong channels through
        text = _model_class(tree, found)
    except ExportError as error:
        raise ExportError(f"{path}: {error}") from None
    return ModelFile(layer, input_size, text)


def _run(path: Path) -> dict[str, Any]:
    if getattr(sys, "frozen", False):
        raise ExportError(
            f"{path}: a frozen application (sys.frozen) has no Python to run it with; "
            "export it with an ordinary Python, or give the layer to upconv.export"
        )
    with tempfile.TemporaryDirectory(prefix="upconv-export-") as folder:
        answer = Path(folder) / "answer.json"
        try:
            done = subprocess.run(
                [sys.executable, str(CHILD), str(path), str(answer)],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise ExportError(
                f"{path}: making its Model and inputs took over {TIMEOUT_SECONDS} s"
            ) from None
        if not answer.is_file():
            said = "\n".join(done.stderr.splitlines()[-5:]) or "nothing"
            raise ExportError(f"{path}: its process ended with code {done.returncode}: {said}")
        found = cast(dict[str, Any], json.loads(answer.read_text()))
    if "unfit" in found:
        raise ExportError(f"{path}: {found['unfit']}")
    return found


def _model_class(tree: ast.Module, found: dict[str, Any]) -> str:
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Model"]
    if len(classes) != 1 or classes[0].decorator_list:
        raise ExportError("Model must be written as one `class Model(nn.Module):` at the top")
    methods = {n.name: n for n in classes[0].body if isinstance(n, ast.FunctionDef)}
    for statement in classes[0].body:
        plain = isinstance(statement, ast.FunctionDef) and not statement.decorator_list
        if not plain and not _is_docstring(statement):
            raise ExportError(f"line {statement.lineno}: Model may hold __init__ and forward only")
    unknown = set(methods) - {"__init__", "forward"}
    if unknown or len(methods) != 2:
        held = ", ".join(methods) or "neither"
        raise ExportError(f"Model must define __init__ and forward and nothing else; has {held}")
    for name, line in found["methods"].items():
        if name not in methods or methods[name].lineno != line:
            raise ExportError(
                f"Model.{name} is not what `class Model` says: a statement outside of the class "
                "changes it, which ModelNew would not do"
            )
    _check_forward(methods["forward"], found["name"])
    return _constructor(methods["__init__"], found)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _check_forward(forward: ast.FunctionDef, name: str) -> None:
    """The body must be `return self.name(x)`, or the same by way of a variable."""
    arguments = [argument.arg for argument in forward.args.args]
    plain = len(arguments) == 2 and not (
        forward.args.vararg or forward.args.kwarg or forward.args.kwonlyargs
    )
    body = [statement for statement in forward.body if not _is_docstring(statement)]
    if plain:
        this, x = arguments
        call = f"{this}.{name}({x})"
        lines = [ast.unparse(statement) for statement in body]
        if lines == [f"return {call}"]:
            return
        if len(body) == 2 and isinstance(body[0], ast.Assign):
            variable = ast.unparse(body[0].targets[0])
            if lines == [f"{variable} = {call}", f"return {variable}"]:
                return
    raise ExportError(
        f"line {forward.lineno}: forward does more than call the layer. Exported is "
        f"`forward(self, x): return self.{name}(x)`, nothing else; move the rest out of Model"
    )


def _constructor(init: ast.FunctionDef, found: dict[str, Any]) -> str:
    """The class with the same constructor, whose layer holds parameters and nothing more."""
    if init.args.vararg or init.args.kwarg or init.args.posonlyargs:
        raise ExportError(f"line {init.lineno}: __init__ must name its arguments, without * and **")
    this, *positional = init.args.args
    names = {argument.arg for argument in [*positional, *init.args.kwonlyargs]}
    known = names | {this.arg}
    body = [s for s in init.body if not _is_docstring(s)]
    lines, made = [], False
    for statement in body:
        text = ast.unparse(statement)
        if text in ("super().__init__()", f"super(Model, {this.arg}).__init__()"):
            lines.append("super().__init__()")
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if not isinstance(target, ast.Attribute) or ast.unparse(target.value) != this.arg:
            raise ExportError(f"line {statement.lineno}: cannot export {text!r} in __init__")
        value = cast(ast.Assign, statement).value
        if target.attr == found["name"]:
            value = _layer_call(value, found["class"])
            made = True
        value = _closed(value, known, found["globals"])
        lines += _assignment(f"{this.arg}.{target.attr}", value)
    if not made:
        raise ExportError(f"line {init.lineno}: __init__ does not assign self.{found['name']}")
    separator = ["*"] if init.args.kwonlyargs else []
    parameters = [_parameter(a, found["defaults"]) for a in positional] + separator
    parameters += [_parameter(a, found["defaults"]) for a in init.args.kwonlyargs]
    return "\n".join(
        [
            "class ModelNew(_nn.Module):",
            '    """Model with another forward; the layer holds the parameters, nothing more."""',
            "",
            "    def __init__(",
            f"        {this.arg},",
            *[f"        {parameter}{',' * (parameter != '')}" for parameter in parameters],
            "    ):",
            *[f"        {line}" for line in lines],
            "",
            "    def forward(self, x: torch.Tensor) -> torch.Tensor:",
            f"        return _conv_transpose(x, self.{found['name']})",
        ]
    )


def _assignment(target: str, value: ast.expr) -> list[str]:
    """On one line where that fits, else with a line for each argument of the call."""
    line = f"{target} = {ast.unparse(value)}"
    if len(line) <= 88 or not isinstance(value, ast.Call):
        return [line]
    arguments = [ast.unparse(argument) for argument in value.args]
    arguments += [ast.unparse(keyword) for keyword in value.keywords]
    head = f"{target} = {ast.unparse(value.func)}("
    return [head, *[f"    {argument}," for argument in arguments], ")"]


def _layer_call(value: ast.expr, class_name: str) -> ast.expr:
    made = value.func if isinstance(value, ast.Call) else value
    last = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")
    if not isinstance(value, ast.Call) or last != class_name:
        text = ast.unparse(value)
        raise ExportError(
            f"line {value.lineno}: the layer must be made as nn.{class_name}(...), not as {text!r}"
        )
    value.func = ast.parse(f"_nn.{class_name}", mode="eval").body
    return value


def _closed(value: ast.expr, known: set[str], literals: dict[str, str]) -> ast.expr:
    """The expression with the file's own constants written out: ModelNew's file has none."""

    class WrittenOut(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            if node.id in known or node.id == "_nn" or hasattr(builtins, node.id):
                return node
            if node.id not in literals:
                raise ExportError(
                    f"line {node.lineno}: __init__ uses {node.id}, which is neither an argument "
                    "nor a plain number; make it an argument"
                )
            return ast.parse(literals[node.id], mode="eval").body

    return cast(ast.expr, WrittenOut().visit(value))


def _parameter(argument: ast.arg, defaults: dict[str, str]) -> str:
    """An argument as in the file; its default as a value, its annotation where it is built in."""
    text = argument.arg
    note = argument.annotation
    if (
        note is not None
        and all(hasattr(builtins, node.id) for node in ast.walk(note) if isinstance(node, ast.Name))
        and not any(isinstance(node, ast.Attribute) for node in ast.walk(note))
    ):
        text += f": {ast.unparse(note)}"
    if argument.arg in defaults:
        text += f" = {defaults[argument.arg]}" if ":" in text else f"={defaults[argument.arg]}"
    return text
