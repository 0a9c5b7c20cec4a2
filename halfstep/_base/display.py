"""Display results: reports, the types of arrays, progress, and plots."""

import abc
import json
import math
import os
import pathlib
import sys
from types import TracebackType
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer

from halfstep._base.trees import Shaped


class Report(abc.ABC):
    """The base class of all reports: text to print, JSON to keep, and HTML in a notebook.

    Example:
        ```python
        import json

        import halfstep
        import jax.numpy as jnp

        report = halfstep.explain(lambda w, x: x @ w, "bf16")(jnp.eye(4), jnp.eye(4))
        assert isinstance(report, halfstep.Report)
        assert json.loads(report.to_json()) == report.to_dict()
        ```
    """

    @abc.abstractmethod
    def __str__(self) -> str:
        """Return the report as text."""

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""

    @abc.abstractmethod
    def _repr_html_(self) -> str:
        """Return the report as HTML; notebooks call this method by its name."""

    def __repr__(self) -> str:
        return str(self)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as JSON, and write it to a file if a path is given.

        JSON has no infinity and no NaN: such numbers are the strings `"inf"`, `"-inf"` and `"nan"`.
        """
        if not isinstance(path, str | os.PathLike | None):
            raise TypeError(
                f"`path` of `to_json` must be a path or None; got {path!r} ({type(path).__name__})."
            )
        made = _as_json(self.to_dict())
        if path is not None:
            pathlib.Path(path).write_text(made + "\n")
        return made


def _as_json(value: dict[str, Any]) -> str:
    """Return plain values as JSON that every reader accepts: non-finite numbers are strings."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def with_values(module: object) -> str:
    """Format a module, with scalar arrays shown as their number where the number is known."""
    # Imported here: `import halfstep` does not need Equinox, and a module exists only with it.
    import equinox as eqx

    return eqx.tree_pformat(jtu.tree_map(_number, module))


def _number(leaf: object) -> object:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return leaf
    if leaf.ndim or leaf.is_deleted():
        return leaf
    # If an array spans several processes, this process has the number only if all have it.
    return leaf.item() if leaf.is_fully_addressable or leaf.is_fully_replicated else leaf


def figure_of(what: str) -> Any:
    """Make an empty figure, which has no size yet.

    The figure is made without pyplot: no window opens, and no state outlives the caller.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"drawing {what} needs matplotlib, which is not installed. Install it with: "
            'pip install "halfstep[plot]"'
        ) from error
    return Figure(layout="constrained")


class Progress:
    """Counts compiles in a terminal or a notebook; shows nothing if tqdm is not installed."""

    def __init__(self, total: int | None, *, show: bool):
        self._bar: Any = None
        if show and _overwrites():
            try:
                from tqdm.auto import tqdm
            except ModuleNotFoundError:
                return
            self._bar = tqdm(total=total, unit="compile", leave=False)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, what: str) -> None:
        """Say what is being compiled."""
        if self._bar is not None:
            # The text is set verbatim: otherwise tqdm writes a second colon where it has no total.
            self._bar.set_description_str(what)

    def done(self) -> None:
        """Count one compile."""
        if self._bar is not None:
            self._bar.update()


def _overwrites() -> bool:
    """Return whether a line on standard error can be overwritten.

    In a file, all states of a bar would stand in one line, with the table that follows.
    """
    terminal = sys.stderr is not None and sys.stderr.isatty()
    # In a notebook, a bar is a widget.
    return terminal or "ipykernel" in sys.modules


def type_of(array: Shaped) -> str:
    """Format the dtype and shape of an array, or of anything that has both: `float32[2, 3]`."""
    return f"{array.dtype}{list(array.shape)}"
