"""The planner's modules as the body of one function, without what is not used.

An exported file holds the planner that this package runs, text and comments included. All of it
goes into one function, because a benchmark harness may run the file in the same namespace as its
own: a name such as `phases` at the top would overwrite the harness's. Only definitions that the
wanted names need are taken. What cannot be moved without changing its meaning is an ExportError.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent

from .errors import ExportError

PLANNER = Path(__file__).resolve().parent.parent / "planner"


@dataclass
class _Definition:
    """A statement at the top of a module, with the comments before and the text after it."""

    name: str
    text: str
    uses: set[str]


@dataclass
class _Module:
    name: str
    docstring: str = ""
    imports: list[tuple[str, str]] = field(default_factory=list)
    """Of the standard library: module, name."""
    parents: list[str] = field(default_factory=list)
    definitions: list[_Definition] = field(default_factory=list)
    typing_names: set[str] = field(default_factory=set)
    """Imported for annotations only."""


class _Reader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, _Module] = {}
        """In the order in which they must stand."""
        self.open: list[str] = []

    def read(self, name: str, where: str) -> None:
        if name in self.modules:
            return
        if name in self.open:
            raise ExportError(f"planner modules import each other: {' -> '.join(self.open)}")
        path = self.folder / f"{name}.py"
        if not path.is_file():
            raise ExportError(f"{where} imports .{name}, which is no module of {self.folder}")
        self.open.append(name)
        self.modules[name] = self.module(name, path.read_text())
        self.open.pop()
        self.modules[name] = self.modules.pop(name)  # after those that it imports

    def module(self, name: str, text: str) -> _Module:
        module = _Module(name)
        lines = text.splitlines()
        tree = ast.parse(text)
        end = 0
        for statement in tree.body:
            where = f"planner/{name}.py:{statement.lineno}"
            start, end = end, statement.end_lineno or 0
            match statement:
                case ast.Expr(value=ast.Constant(value=str(words))):
                    if module.definitions:  # the words under a constant
                        module.definitions[-1].text += "\n" + "\n".join(lines[start:end])
                    else:
                        module.docstring = words
                case ast.Import() | ast.ImportFrom():
                    self.imported(module, statement, where)
                case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=[]):
                    names = [n for s in statement.body for n in getattr(s, "names", [])]
                    module.typing_names |= {alias.asname or alias.name for alias in names}
                case ast.Assign(targets=[ast.Name(id=defined)]):
                    self.define(module, defined, statement, lines[start:end])
                case ast.Assign(targets=[ast.Tuple(elts=elements)]):
                    # One definition; the other names lead to it.
                    names = [e.id for e in elements if isinstance(e, ast.Name)]
                    if len(names) != len(elements):
                        raise ExportError(f"{where}: cannot move {ast.unparse(statement)!r}")
                    self.define(module, names[0], statement, lines[start:end])
                    module.definitions += [_Definition(n, "", {names[0]}) for n in names[1:]]
                case ast.AnnAssign(target=ast.Name(id=defined)):
                    self.define(module, defined, statement, lines[start:end])
                case ast.FunctionDef(name=defined) | ast.ClassDef(name=defined):
                    self.define(module, defined, statement, lines[start:end])
                case _:
                    kind = type(statement).__name__
                    raise ExportError(f"{where}: a module to be exported cannot hold {kind} here")
        return module

    def imported(self, module: _Module, statement: ast.Import | ast.ImportFrom, where: str) -> None:
        renamed = [alias for alias in statement.names if alias.asname not in (None, alias.name)]
        if renamed or isinstance(statement, ast.Import):
            raise ExportError(f"{where}: write `from module import name`, without another name")
        source = statement.module or ""
        if statement.level == 0:
            if source.split(".")[0] not in sys.stdlib_module_names:
                raise ExportError(f"{where}: {source} is not in the standard library")
            if source != "__future__":
                wanted = [alias.name for alias in statement.names]
                module.imports += [(source, n) for n in wanted if n != "TYPE_CHECKING"]
        elif statement.level == 1 and source and "." not in source:
            module.parents.append(source)
            self.read(source, where)
        else:
            raise ExportError(f"{where}: only `from .module import name` can be followed")

    def define(self, module: _Module, name: str, node: ast.stmt, lines: list[str]) -> None:
        if any(isinstance(part, ast.Try) for part in ast.walk(node)):
            raise ExportError(f"planner/{module.name}.py: {name} holds `try`, which is refused")
        uses = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        module.definitions.append(_Definition(name, "\n".join(lines), uses))


def bundle(module: str, wanted: Iterable[str], folder: Path = PLANNER) -> str:
    """The body of a function that defines the wanted names of `module` and of what it imports."""
    reader = _Reader(folder)
    reader.read(module, "the exporter")
    modules = list(reader.modules.values())
    where: dict[str, str] = {}
    for part in modules:
        for definition in part.definitions:
            if definition.name in where:
                raise ExportError(
                    f"{definition.name} is defined in planner/{where[definition.name]}.py and "
                    f"planner/{part.name}.py; one file cannot hold both, rename one"
                )
            where[definition.name] = part.name
    needed = _reachable({d.name: d for part in modules for d in part.definitions}, wanted)
    later = set(where) | {name for part in modules for name in part.typing_names}
    sections = []
    imports: dict[str, set[str]] = {}
    for part in modules:
        taken = [d for d in part.definitions if d.name in needed]
        if not any(d.text for d in taken):
            continue
        used = set().union(*(d.uses for d in taken))
        for source, name in part.imports:
            if name in used:
                imports.setdefault(source, set()).add(name)
        text = "\n".join(d.text for d in taken if d.text)
        sections.append(_heading(part) + "\n" + _quoted(text, later).strip("\n"))
    lines = [f"from {source} import {', '.join(sorted(imports[source]))}" for source in imports]
    return "\n\n".join(["\n".join(sorted(lines)), *sections])


def _reachable(definitions: dict[str, _Definition], wanted: Iterable[str]) -> set[str]:
    waiting, reached = list(wanted), set()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        if name not in definitions:
            raise ExportError(f"no planner module of this kernel defines {name}")
        reached.add(name)
        waiting += [use for use in definitions[name].uses if use in definitions]
    return reached


def _heading(module: _Module) -> str:
    title = f"# {'=' * 5} planner/{module.name}.py {'=' * 90}"[:96]
    return (
        title
        + "\n"
        + indent(module.docstring.strip(), "# ", lambda line: True).replace("# \n", "#\n")
    )


def _quoted(text: str, names: set[str]) -> str:
    """Annotations that name one of `names` become strings: the name may be defined later."""
    edits = []
    for node in ast.walk(ast.parse(text)):
        annotations: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            annotations = [argument.annotation for argument in every] + [node.returns]
        elif isinstance(node, ast.AnnAssign):
            annotations = [node.annotation]
        for annotation in annotations:
            if annotation is None or isinstance(annotation, ast.Constant):
                continue
            if any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(annotation)):
                edits.append(annotation)
    lines = text.splitlines()
    for node in sorted(edits, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or 0) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset or 0 :]
        lines[first : last + 1] = [f'{before}"{ast.unparse(node)}"{after}']
    return "\n".join(lines)
