"""Make one file of an example and the files that it imports.

In the repository, examples share their options, data and plots, so that each is short. Somebody who
has installed halfstep wants one file to read, run and change. So the shared code is copied above
the example: imports are collected, names that two files use for different things get the name of
their file in front, and comments stay where they are.
"""

import ast
import collections
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

# The package that the files of the repository are in.
_PACKAGE = "examples"


@dataclasses.dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
        name: Its name, without `.py`.
        text: Its content.
    """

    name: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The file's syntax."""
        return ast.parse(self.text)

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (ast.get_docstring(self.tree) or "").split("\n")[0]

    @property
    def siblings(self) -> Iterator[tuple[str, str | None, str]]:
        """The imports from other examples: file, name in it (`None`: the file), name here."""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == _PACKAGE:
                yield from ((one.name, None, one.asname or one.name) for one in node.names)
            elif isinstance(node, ast.ImportFrom) and _is_sibling(node):
                file = str(node.module).partition(".")[2]
                yield from ((file, one.name, one.asname or one.name) for one in node.names)

    @property
    def imports(self) -> Iterator[tuple[str | None, ast.alias]]:
        """All other imports: the module that something is taken from, and what."""
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                yield from ((None, one) for one in node.names)
            elif isinstance(node, ast.ImportFrom) and not _is_sibling(node):
                yield from ((node.module, one) for one in node.names)

    @property
    def defined(self) -> set[str]:
        """The names that it defines."""
        found: set[str] = set()
        for node in self.tree.body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Assign(targets=targets):
                    found |= {one.id for one in targets if isinstance(one, ast.Name)}
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
                case _:
                    pass
        return found


def _is_sibling(node: ast.ImportFrom) -> bool:
    return str(node.module).split(".")[0] == _PACKAGE


def needed(read: Callable[[str], Source], name: str) -> list[Source]:
    """Return the files of an example, those that are imported before those that import them.

    Args:
        read: Returns the file of a name. Examples share files, and each is best read once.
        name: The name of the example.
    """
    found: dict[str, Source] = {}

    def visit(name: str) -> None:
        source = read(name)
        for file in dict.fromkeys(file for file, _, _ in source.siblings):
            if file not in found:
                visit(file)
        found[name] = source

    visit(name)
    return list(found.values())


def bundle(sources: Sequence[Source]) -> str:
    """Return one file that does what the last of these files does."""
    *shared, example = sources
    renamed = _renamed(sources)
    parts = [_docstring(example), _imports(sources)]
    for source in shared:
        parts.append(f"# {source.name.lstrip('_')}: {source.summary}\n\n")
        parts.append(_body(source, renamed))
    if shared:
        parts.append("# The example itself.\n\n")
    parts.append(_body(example, renamed))
    text = "\n".join(part.strip("\n") + "\n" for part in parts)
    # Two empty lines around what stands at the top, as formatters want it.
    text = re.sub(r"\n{3,}", "\n\n\n", text)
    text = re.sub(rf"python -m {_PACKAGE}\.([\w{{}}]+)", r"python \1.py", text)
    return re.sub(rf"\b{_PACKAGE}\.(\w+):", r"\1.py:", text)


def _renamed(sources: Sequence[Source]) -> Mapping[str, Mapping[str, str]]:
    """Return, for each file, its names that are renamed, and what they become."""
    counts = collections.Counter(name for source in sources for name in source.defined)
    # A name behind its file's name may be that of a local variable: it could not stand alone.
    behind = {
        (node.value.id, node.attr)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    *shared, example = sources
    made = {
        source.name: {
            name: f"{source.name.lstrip('_')}_{name.lstrip('_')}"
            for name in source.defined
            if counts[name] > 1 or (source.name, name) in behind
        }
        for source in shared
    }
    return {**made, example.name: {}}


def _docstring(source: Source) -> str:
    first = source.tree.body[0]
    return "\n".join(source.text.split("\n")[: first.end_lineno])


def _imports(sources: Sequence[Source]) -> str:
    """Return all imports, each once: Python's own, others', and halfstep's."""
    groups: list[dict[str | None, set[str]]] = [{}, {}, {}]
    targets: dict[str, tuple[str | None, str]] = {}
    for source in sources:
        for module, alias in source.imports:
            local = alias.asname or alias.name
            if targets.setdefault(local, (module, alias.name)) != (module, alias.name):
                raise ValueError(
                    f"two examples import different things as {local!r}; got {module} and "
                    f"{targets[local][0]}. Give one of them another name."
                )
            root = (module or alias.name).split(".")[0]
            number = 0 if root in sys.stdlib_module_names else 2 if root == "halfstep" else 1
            groups[number].setdefault(module, set()).add(ast.unparse(alias))
    blocks = []
    for group in groups:
        lines = [f"import {name}" for name in sorted(group.pop(None, ()))]
        lines += [_from(str(module), sorted(group[module])) for module in sorted(map(str, group))]
        blocks.append("\n".join(lines))
    return "\n\n".join(block for block in blocks if block) + "\n\n"


def _from(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 100:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def _body(source: Source, renamed: Mapping[str, Mapping[str, str]]) -> str:
    """Return a file without docstring and imports, in which names are those of the whole."""
    files = {here: file for file, name, here in source.siblings if name is None}
    names = dict(renamed[source.name])
    for file, name, here in source.siblings:
        if name is not None and (final := renamed[file].get(name, name)) != here:
            names[here] = final
    lines = source.text.split("\n")
    edits: list[tuple[int, int, int, str]] = []
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=file), attr=attr) if file in files:
                final = renamed[files[file]][attr]
                edits.append((node.lineno, node.col_offset, node.end_col_offset or 0, final))
            case ast.Name(id=name) if name in names:
                edits.append((node.lineno, node.col_offset, node.end_col_offset or 0, names[name]))
            case ast.arg(arg=name) if name in names:
                raise ValueError(
                    f"{source.name}.py has a parameter {name!r} and a global of that name, which "
                    "another example also has. Give one of them another name."
                )
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if name in names:
                start = lines[node.lineno - 1].index(f" {name}", node.col_offset) + 1
                edits.append((node.lineno, start, start + len(name), names[name]))
            case _:
                pass
    # From the end, so that positions before stay as they are.
    for number, start, end, final in sorted(edits, reverse=True):
        line = lines[number - 1]
        lines[number - 1] = line[:start] + final + line[end:]
    for at, node in enumerate(source.tree.body):
        is_docstring = at == 0 and isinstance(node, ast.Expr)
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[number - 1] = ""
    return "\n".join(lines).strip("\n") + "\n\n\n"
