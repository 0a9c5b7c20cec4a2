"""Every error and warning of the package, with the template of its message, from its source."""

import ast
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator
from typing import TypeGuard

ROOT = pathlib.Path(__file__).parents[1]
Functions = dict[str, ast.FunctionDef]


@dataclasses.dataclass(frozen=True)
class Site:
    """A place where an error is raised, or a warning is given.

    Attributes:
        file: Where, relative to the repository.
        line: Its first line.
        kind: The exception's class, or the warning's.
        template: The message, with `<names>` for what is filled in.
    """

    file: str
    line: int
    kind: str
    template: str


def sites(package: pathlib.Path = ROOT / "halfstep") -> list[Site]:
    """All of a package, in the order of its files and their lines."""
    found = []
    for path in sorted(package.rglob("*.py")):
        found += of_source(path.read_text(), str(path.relative_to(package.parent)))
    return found


def of_source(source: str, file: str) -> Iterator[Site]:
    """All of a file. What is caught and passed on as it is was raised elsewhere."""
    tree = ast.parse(source)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    owners = _owners(tree)
    raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) or _warns(node)]
    for node in sorted(raised, key=lambda node: node.lineno):
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Name) and call.id[0].isupper():
            call = ast.Call(call, [], [])
        if not isinstance(call, ast.Call):
            continue
        owner = owners[node]
        if isinstance(call.func, ast.Name) and call.func.id in functions:
            # A function of the same file makes the error.
            owner = functions[call.func.id]
            made = [one.value for one in ast.walk(owner) if isinstance(one, ast.Return)]
            call = next(one for one in made if isinstance(one, ast.Call))
        kind = "UserWarning" if _warns(call) else _kind(call.func, owner)
        texts = Scope(functions, owner).texts(call.args[0]) if call.args else []
        for text in dict.fromkeys(texts):
            template = re.sub(r"\s*\n\s*", " ", text).strip()
            # What is caught and told again was raised, and is listed, elsewhere.
            if re.search("[a-z]{2}", _bare(template)):
                yield Site(file, node.lineno, kind, template)


def _warns(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether this gives a warning; all that the package gives are of one class."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="warnings"), attr="warn")):
            return True
        case _:
            return False


def _kind(function: ast.AST, owner: ast.AST) -> str:
    """The class of an exception; of one that is chosen before, all of them."""
    name = ast.unparse(function).rpartition(".")[2]
    for node in ast.walk(owner):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=target)],
                value=ast.IfExp(body=ast.Name(id=one), orelse=ast.Name(id=other)),
            ) if target == name:
                return f"{one} or {other}"
            case _:
                pass
    return name


def _owners(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    """The innermost function around each node; the module where there is none."""
    found: dict[ast.AST, ast.AST] = {}

    def visit(node: ast.AST, owner: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            found[child] = owner
            visit(child, child if isinstance(child, ast.FunctionDef) else owner)

    visit(tree, tree)
    return found


@dataclasses.dataclass(frozen=True)
class Scope:
    """Where an expression stands: the file's functions, and the one that it is in."""

    functions: Functions
    owner: ast.AST
    seen: frozenset[str] = frozenset()

    def texts(self, node: ast.AST) -> list[str]:
        """The templates of an expression: several if what it calls returns one or another."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return ["".join(self._part(value) for value in values)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                pairs = itertools.product(self.texts(left), self.texts(right))
                return ["".join(pair) for pair in pairs]
            case ast.IfExp(body=body, orelse=orelse):
                return [*self.texts(body), *self.texts(orelse)]
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                function = self.functions[name]
                inner = Scope(self.functions, function)
                returned = [
                    text
                    for one in ast.walk(function)
                    if isinstance(one, ast.Return) and one.value is not None
                    for text in inner.texts(one.value)
                ]
                return returned or [f"<{_name(node)}>"]
            case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[inner]):
                return self.texts(inner)
            case ast.Call(func=ast.Attribute(value=ast.JoinedStr() as text, attr="rstrip")):
                return self.texts(text)
            case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element):
                return self.texts(element)
            case ast.List(elts=elements) if elements:
                return [" ".join(self.texts(element)[0] for element in elements)]
            case ast.Name(id=name) if name not in self.seen:
                return self._assigned(name) or [f"<{_name(node)}>"]
            case _:
                return [f"<{_name(node)}>"]

    def _assigned(self, name: str) -> list[str]:
        """What a name stands for: what it is set to; of a list, all that it may hold."""
        inner = dataclasses.replace(self, seen=self.seen | {name})
        found, more = [], []
        for node in ast.walk(self.owner):
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    found += inner.texts(value)
                case ast.AnnAssign(target=ast.Name(id=target), value=value) if (
                    target == name and value is not None
                ):
                    found += inner.texts(value)
                case ast.Call(func=ast.Attribute(ast.Name(id=of), "append"), args=[value]) if (
                    of == name
                ):
                    more += inner.texts(value)
                case _:
                    pass
        return [" ".join([*found, *more])] if more else found

    def _part(self, node: ast.AST) -> str:
        """A piece of a text. What may be empty is in brackets."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
            texts = [] if node.value.id in self.seen else self._assigned(node.value.id)
            written = [text for text in texts if re.search("[a-z]{3} [a-z]", _bare(text))]
            if len(written) == 1 and set(texts) <= {written[0], ""}:
                return f"[{written[0]}]" if "" in texts else written[0]
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Name) and called.id in self.functions:
                texts = self.texts(node.value)
                if all(re.search("[a-z]{3} .*[a-z]{3} ", _bare(text)) for text in texts):
                    return " (or) ".join(dict.fromkeys(texts))
        return f"<{_name(node)}>"


def _bare(text: str) -> str:
    """A template without what is filled in."""
    return re.sub("<[^<>]*>", "", text)


def _name(node: ast.AST) -> str:
    """What is filled in, in words."""
    match node:
        case ast.FormattedValue(value=value):
            return _name(value)
        case ast.Name(id=name):
            return name.strip("_").replace("_", " ").lower()
        case ast.Attribute(value=ast.Call(func=ast.Name(id="type"), args=[of]), attr="__name__"):
            return f"type of {_name(of)}"
        case ast.Attribute(value=ast.Name(id="self" | "arguments" | "error"), attr=name):
            return name.strip("_").replace("_", " ")
        case ast.Attribute(value=value, attr=name):
            return f"{_name(value)} {name.strip('_').replace('_', ' ')}"
        case ast.Call(func=ast.Name(id="len"), args=[of]):
            return f"number of {_name(of)}"
        case ast.Call(func=ast.Name(id="type_of"), args=[of]):
            return f"dtype and shape of {_name(of)}"
        case ast.Call(func=ast.Name(id="map"), args=[_, of]):
            return _name(of)
        case ast.Call(args=[of, *_]):
            return _name(of)
        case ast.Call(func=ast.Attribute(value=value)):
            return _name(value)
        case ast.Call(func=of):
            return _name(of)
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
            return f"{_name(value)} {key}" if not isinstance(value, ast.Name) else key
        case ast.Subscript(value=value):
            return _name(value)
        case ast.GeneratorExp(generators=[one, *_]) | ast.ListComp(generators=[one, *_]):
            return _name(one.iter)
        case ast.BoolOp(values=[first, *_]):
            return _name(first)
        case ast.BinOp(left=left):
            return _name(left)
        case ast.IfExp(body=body, orelse=orelse):
            said = [_name(one) for one in (body, orelse)]
            return " or ".join(text.strip() for text in said if text.strip())
        case ast.Starred(value=value):
            return _name(value)
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(
                str(one.value) if isinstance(one, ast.Constant) else _name(one) for one in values
            ).strip()
        case _:
            return "..."


# How messages begin to say what to do.
_VERBS = (
    "add|allow|ask|bring|call|change|check|choose|convert|count|delete|did you mean|fix|give"
    "|go back|initialize|install|keep|leave|let|look|lower|make|mend|name|or name|pass|put"
    "|raise|record|reduce|register|reshape|restore|resume|return|save|select|set|shard|stack"
    "|start|take|try|unset|update|use|wait|wrap|write"
)
_ADVICE = re.compile(rf"(?:(?<=[.;:,)>\]] )|(?<=\[ )|^)(?:{_VERBS})\b", re.IGNORECASE)
_WHEN = re.compile(r"(?:^|[.\]>] )((?:If|For|With|As|Without|To)\b[^.]*)$")
# What is required is what to do, where it is said and then what came.
_LISTED = re.compile(r".*[;,] (required one of .*)")
_REQUIRED = re.compile(
    r"(.*(?:\bmust\b|\bis\b|\bare\b|\brequired\b|\bneeds?\b|\btakes?\b|\bends\b).*?)[;,] "
    r"(?:got|the saved one is|it has|the state has|the capture has|found|which)\b.*"
)


def cure(template: str) -> str:
    """The part of a message that says what to do; empty if there is none."""
    listed = _LISTED.fullmatch(template)
    found = _ADVICE.search(template)
    if found and not listed:
        when = _WHEN.search(template[: found.start()])
        start = when.start(1) if when else found.start()
        return template[start:].strip(" ]")
    required = listed or _REQUIRED.fullmatch(template)
    return required[1] if required else ""
