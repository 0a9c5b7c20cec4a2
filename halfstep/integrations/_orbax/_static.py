"""Save those fields of halfstep's own nodes that are not arrays and change in a run.

A ledger and a recipe's state both record the products that were taken out of 8 bits. They do so in
fields that are a part of the compiled program and are not leaves. If only leaves were restored, a
run would silently compute these products in 8 bits again.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeGuard, TypeVar

import jax

from halfstep._policy import Recipe
from halfstep._training import AbstractLossScaling, Ledger, SiteState
from halfstep.integrations._orbax._errors import CheckpointError
from halfstep.integrations._orbax._json_values import decoded, encoded

_Node = AbstractLossScaling | Ledger | SiteState
T = TypeVar("T")


def static_fields(tree: object) -> dict[str, dict[str, Any]]:
    """Return the fields of halfstep's nodes that are not leaves, by the names of node and field."""
    found = {}
    for name, node in _nodes(tree, ""):
        fields = {field: _as_json(getattr(node, field)) for field in _fields(node)}
        found[name] = {"type": type(node).__name__, **fields}
    return found


def with_static_fields(tree: T, saved: dict[str, dict[str, Any]], step: int) -> T:
    """Return the tree with the saved fields in place of its own.

    Raises:
        CheckpointError: If a node is of another type or recipe than the saved one.
    """
    for name, node in _nodes(tree, ""):
        about = saved.get(name)
        kind = None if about is None else about["type"]
        if kind != type(node).__name__:
            stored = "has none of halfstep's types there" if kind is None else f"has a {kind}"
            raise CheckpointError(
                f"step {step} {stored} where `{name}` of `like` is a {type(node).__name__}. Make "
                "`like` the way the state was made that was saved."
            )
    return _replaced(tree, saved, "", step)


def _is_node(node: object) -> TypeGuard[_Node]:
    return isinstance(node, _Node)


def _fields(node: _Node) -> list[str]:
    fields = [field for field in dataclasses.fields(node) if field.metadata.get("static", False)]
    return [field.name for field in fields if _is_plain(getattr(node, field.name))]


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | Recipe)


def _as_json(value: object) -> Any:
    if isinstance(value, Recipe):
        return value.name
    if isinstance(value, float):
        return encoded(value, "a field of the state")
    return [_as_json(item) for item in value] if isinstance(value, tuple) else value


def _from_json(value: object) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    return decoded(value, "a field of the state")


def _is_alike(saved: object, own: object) -> bool:
    """Return whether a saved field can replace another: they have one type, or one is `None`."""
    if saved is None or own is None:
        return True
    if isinstance(saved, tuple):
        return isinstance(own, tuple) and all(map(_is_plain, saved))
    return type(saved) is type(own)


def _children(node: _Node) -> list[str]:
    fields = [field for field in dataclasses.fields(node) if not field.metadata.get("static")]
    return [field.name for field in fields]


def _nodes(tree: object, root: str) -> Iterator[tuple[str, _Node]]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_node)
    for path, node in found:
        if _is_node(node):
            name = f"{root}{jax.tree_util.keystr(path)}"
            yield name or ".", node
            for child in _children(node):
                yield from _nodes(getattr(node, child), f"{name}.{child}")


def _replaced(tree: T, saved: dict[str, dict[str, Any]], root: str, step: int) -> T:
    def of(path: tuple[Any, ...], node: object) -> object:
        if not _is_node(node):
            return node
        name = f"{root}{jax.tree_util.keystr(path)}"
        return _restored(node, saved, name, step)

    return jax.tree_util.tree_map_with_path(of, tree, is_leaf=_is_node)


def _restored(node: _Node, saved: dict[str, dict[str, Any]], name: str, step: int) -> _Node:
    about, made = saved[name or "."], object.__new__(type(node))
    known = _fields(node)
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        # The name of a recipe stands for all of its settings. Another recipe would not fit the
        # arrays.
        if isinstance(value, Recipe):
            if about.get(field.name) != value.name:
                raise CheckpointError(
                    f"`{name}` of step {step} is of the recipe {about.get(field.name)!r}; `like` "
                    f"has {value.name!r}. Make `like` with the recipe that was saved."
                )
        elif field.name in known and field.name in about:
            saved_value = _from_json(about[field.name])
            if not _is_alike(saved_value, value):
                raise CheckpointError(
                    f"`{name}.{field.name}` of step {step} is {saved_value!r:.60}; `like` has "
                    f"{value!r:.60} there. Make `like` the way the state was made that was saved."
                )
            value = saved_value
        elif field.name in _children(node):
            value = _replaced(value, saved, f"{name}.{field.name}", step)
        # The node is frozen, and its constructor takes other arguments than its fields.
        object.__setattr__(made, field.name, value)
    return made
