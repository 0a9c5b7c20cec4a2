"""The public names and signatures as text. `python -m tests._api` writes `tests/api.txt` anew.

It reads sources and imports nothing, so that the text depends on no version of JAX and on no extra.
Public is what a module without an underscore in its path defines, or imports as `x as x`.
"""

import ast
import functools
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
SNAPSHOT = ROOT / "tests" / "api.txt"
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(path: pathlib.Path) -> Iterator[ast.stmt]:
    """What a module says, with what it says to type checkers alone."""
    for node in parsed(path).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from node.body
        else:
            yield node


def file_of(module: str, root: pathlib.Path) -> pathlib.Path:
    base = root.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def modules(root: pathlib.Path) -> Iterator[str]:
    """The public modules: no part of their path begins with an underscore."""
    for path in sorted((root / "halfstep").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            yield ".".join(parts)


def names_of(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


def find(module: str, name: str, root: pathlib.Path) -> Definition | None:
    """Where a name is defined, through imports; `None` for a module.

    Of an object that is made by its class, the class: that is how it is used.
    """
    for node in statements(file_of(module, root)):
        if isinstance(node, Definition) and name in names_of(node):
            made = getattr(node.value, "func", None) if isinstance(node, ast.Assign) else None
            classes = (n for n in parsed(file_of(module, root)).body if isinstance(n, ast.ClassDef))
            return next((n for n in classes if ast.unparse(made or node) == n.name), node)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    if file_of(f"{node.module}.{alias.name}", root).exists():
                        return None
                    return find(node.module, alias.name, root)
    raise LookupError(f"{module} has no {name}")


def public(module: str, root: pathlib.Path) -> list[str]:
    found: set[str] = set()
    for node in statements(file_of(module, root)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("halfstep"):
            found |= {alias.name for alias in node.names if alias.asname == alias.name}
        else:
            found |= set(names_of(node))
    return sorted(name for name in found if not name.startswith("_") or name == "__version__")


def signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def rendered(name: str, node: Definition) -> Iterator[str]:
    """A line for a name, and one for each public member of a class."""
    if isinstance(node, ast.FunctionDef):
        yield f"{name}{signature(node)}"
    elif isinstance(node, ast.ClassDef):
        yield f"class {name}({', '.join(ast.unparse(base) for base in node.bases)})"
        for member in node.body:
            inner = names_of(member)
            if isinstance(member, ast.FunctionDef):
                if member.name in ("__init__", "__call__") or not member.name.startswith("_"):
                    found = [ast.unparse(mark) for mark in member.decorator_list]
                    # That arguments are checked is not part of how a function is called.
                    marks = "".join(f"@{mark} " for mark in found if "checked" not in mark)
                    yield f"    {marks}{member.name}{signature(member)}"
            elif inner and not inner[0].startswith("_"):
                yield f"    {ast.unparse(member)}"
    elif isinstance(node, ast.AnnAssign):
        yield f"{name}: {ast.unparse(node.annotation)}"
    else:
        yield f"{name} = {ast.unparse(node.value)}"


def snapshot(root: pathlib.Path = ROOT) -> str:
    lines: list[str] = []
    for module in modules(root):
        names = public(module, root)
        if names:
            lines.append(f"# {module}")
        for name in names:
            node = find(module, name, root)
            lines += [f"module {name}"] if node is None else rendered(name, node)
        lines += [""] if names else []
    return "\n".join(lines)


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot())
    print(f"{SNAPSHOT.relative_to(ROOT)}: written")
