"""What every report has: text, plain values, JSON, and HTML for notebooks."""

import abc
import json
import math
import os
import pathlib
from typing import Any


class Report(abc.ABC):
    """What every report of halfstep's is: text to print, JSON to keep, and HTML in a notebook.

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
        """The report as text."""

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""

    @abc.abstractmethod
    def _repr_html_(self) -> str:
        """The report as HTML, which notebooks ask for by this name."""

    def __repr__(self) -> str:
        return str(self)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Everything as JSON; also written to a file if a path is given.

        JSON has no infinity and no NaN: such numbers are the texts `"inf"`, `"-inf"` and `"nan"`.
        """
        made = as_json(self.to_dict())
        if path is not None:
            pathlib.Path(path).write_text(made + "\n")
        return made


def as_json(value: Any) -> str:
    """Plain values as JSON that every reader accepts: what is not finite is text."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
