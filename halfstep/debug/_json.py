"""Reports as JSON."""

import json
import math
import os
import pathlib
from typing import Any


def as_json(report: Any, path: str | os.PathLike[str] | None = None) -> str:
    """Plain values as JSON, infinite numbers as text; also written to a file if one is given."""
    made = json.dumps(_plain(report), indent=2)
    if path is not None:
        pathlib.Path(path).write_text(made + "\n")
    return made


def _plain(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
