"""Whether a step is what `like` asks for: the same leaves, in the same dtypes and shapes."""

from collections.abc import Mapping, Sequence
from typing import Any

from halfstep.integrations._orbax._errors import CheckpointError
from halfstep.integrations._orbax._tree import Leaf, describe

_SHOWN = 5


def check_leaves(
    like: Sequence[Leaf], saved: Mapping[str, Mapping[str, Any]], step: int, folder: str
) -> None:
    """Raise unless all leaves fit.

    Raises:
        CheckpointError: It says what is stored, what was asked for, and what to do.
    """
    asked = {leaf.name for leaf in like}
    lacking = [name for name in asked if name not in saved]
    beyond = [name for name in saved if name not in asked]
    if lacking or beyond:
        parts = []
        if lacking:
            parts.append(f"`like` has {_listed(sorted(lacking))}, which the step has not")
        if beyond:
            parts.append(f"the step has {_listed(sorted(beyond))}, which `like` has not")
        raise CheckpointError(
            f"step {step} in {folder} is of another structure: {'; '.join(parts)}. Make `like` "
            "the way the state was made that was saved: the same model, optimizer and policy."
        )
    wrong = [leaf for leaf in like if not _fits(leaf, saved[leaf.name])]
    if wrong:
        leaf, stored = wrong[0], dict(saved[wrong[0].name])
        others = f" {len(wrong) - 1} more leaves differ." if len(wrong) > 1 else ""
        raise CheckpointError(
            f"`{leaf.name}` of step {step} in {folder} is stored as {describe(stored)}; `like` "
            f"asks for {describe(leaf.about())}, and nothing is cast.{others} "
            f"{_advice(leaf, stored)}"
        )


def check_options(now: Mapping[str, Any], saved: Mapping[str, Any], step: int, folder: str) -> None:
    """Raise if the step was written with other options.

    Raises:
        CheckpointError: It lists those that differ.
    """
    changed = [
        f"{name}={saved.get(name)} (now {now.get(name)})"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"step {step} in {folder} was written with other options: {', '.join(changed)}. Resume "
            "with the same ones, or write to another folder."
        )


def _fits(leaf: Leaf, stored: Mapping[str, Any]) -> bool:
    asked = leaf.about()
    # The values of Python's own leaves are what is restored, and another type is no other state.
    ignored = ("digest", "value", "other")
    kept = {name: value for name, value in stored.items() if name not in ignored}
    return kept == {name: value for name, value in asked.items() if name not in ignored}


def _advice(leaf: Leaf, stored: Mapping[str, Any]) -> str:
    if leaf.kind == "array" and "dtype" in stored and "keys" not in stored:
        dtype, shape = stored["dtype"], tuple(stored["shape"])
        return (
            f"Put `jax.ShapeDtypeStruct({shape}, '{dtype}')` there, or an array like that, and "
            "cast what was restored."
        )
    return "Make `like` the way the state was made that was saved."


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
