"""Write and check the manifest of a step: its number, the run's options, and its leaves.

A manifest may come from a stranger. Everything in it is checked before any of it is used.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from halfstep._base import DamagedFolderError
from halfstep._version import __version__
from halfstep.integrations._orbax._json_values import decoded, encoded
from halfstep.integrations._orbax._leaves import as_python

FORMAT = 2
"""The format's number. It grows when older versions cannot read a new format. The first format had
no number."""
PLAIN = frozenset(kind.__name__ for kind in (bool, int, float, complex, str))
"""The names of Python's own types whose values are saved."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a step.

    Attributes:
        step: The number of the step.
        processes: The number of processes that wrote the step.
        options: The options of the run.
        leaves: A description of each leaf, by its name: dtype, shape and digest of an array, or the
            value of one of Python's own types.
        static: Fields of halfstep's nodes that are not leaves, by the node's name.
    """

    step: int
    processes: int
    options: Mapping[str, Any] | None
    leaves: dict[str, dict[str, Any]]
    static: dict[str, dict[str, Any]]

    def text(self) -> str:
        """Return the text of the manifest's file."""
        about = {
            "halfstep": __version__,
            "format": FORMAT,
            **dataclasses.asdict(self),
            "options": None if self.options is None else encoded(self.options, "`options`"),
        }
        return json.dumps(about, indent=1, allow_nan=False)

    @property
    def array_bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(
            math.prod(leaf["shape"]) * jnp.dtype(leaf["dtype"]).itemsize
            for leaf in self.leaves.values()
            if "dtype" in leaf
        )


def read(said: Any, step: int) -> Manifest:
    """Check the content of a manifest, and return the manifest.

    Args:
        said: The content of the file.
        step: The step's number, from the name of its folder.

    Raises:
        DamagedFolderError: If it is not a manifest, or not the manifest of this step. The message
            is a reason.
    """
    known = _fields(said, _MANIFEST, "the manifest")
    version = said.get("format", 1)
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise DamagedFolderError(
            f"the manifest is of format {version!r}, and this version reads 1 to {FORMAT}: install "
            "the version of halfstep that wrote it"
        )
    if known["step"] != step:
        raise DamagedFolderError(
            f"the manifest is of step {known['step']}, and its folder is named {step}"
        )
    options = known["options"]
    if options is not None and version > 1:
        options = decoded(options, "`options` of the manifest")
        if not isinstance(options, dict):
            raise DamagedFolderError(
                f"`options` of the manifest is a {type(options).__name__}, not a dictionary"
            )
    for name, leaf in known["leaves"].items():
        _check_leaf(leaf, f"the leaf {name[:200]!r} of the manifest")
    for name, node in known["static"].items():
        _fields(node, {"type": _is_text}, f"the node {name[:200]!r} of the manifest")
    return Manifest(step, known["processes"], options, known["leaves"], known["static"])


_Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_mapping(value: Any) -> bool:
    return type(value) is dict


def _is_shape(value: Any) -> bool:
    return type(value) is list and len(value) <= 64 and all(map(_is_count, value))


def _is_dtype(value: Any) -> bool:
    if not _is_text(value) or len(value) > 64:
        return False
    try:
        return jnp.dtype(value).kind not in "OSUMm"
    except TypeError:
        return False


_MANIFEST: Mapping[str, _Check] = MappingProxyType(
    {
        "step": _is_count,
        "processes": _is_count,
        "options": lambda value: value is None or type(value) is dict,
        "leaves": _is_mapping,
        "static": _is_mapping,
    }
)
_ARRAY: Mapping[str, _Check] = MappingProxyType(
    {"dtype": _is_dtype, "shape": _is_shape, "digest": _is_text}
)
_VALUE: Mapping[str, _Check] = MappingProxyType(
    {"python": PLAIN.__contains__, "value": lambda value: True}
)


def _check_leaf(leaf: Any, what: str) -> None:
    if _is_mapping(leaf) and "dtype" in leaf:
        _fields(leaf, _ARRAY, what)
        if not _is_text(leaf.get("keys", "")):
            raise DamagedFolderError(f"{what} has keys of no name")
    elif _is_mapping(leaf) and "python" in leaf:
        _fields(leaf, _VALUE, what)
        as_python(leaf)
    else:
        _fields(leaf, {"other": _is_text}, what)


def _fields(said: Any, checks: Mapping[str, _Check], what: str) -> dict[str, Any]:
    """Return the fields that are required.

    Raises:
        DamagedFolderError: If a field is missing or of another kind.
    """
    if type(said) is not dict:
        raise DamagedFolderError(f"{what} is a {type(said).__name__}, not an object")
    for name, check in checks.items():
        try:
            is_good = name in said and check(said[name])
        except TypeError:
            # The value cannot be looked up, for example because it is a list.
            is_good = False
        if not is_good:
            shown = repr(said[name])[:60] if name in said else "nothing"
            raise DamagedFolderError(f"{what} says {shown} where there must be a {name!r}")
    return {name: said[name] for name in checks}
