"""Which rows of a matrix of tests are run on every change; the others are `slow`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(rows: Iterable[Any], fast: Callable[..., bool]) -> list[Any]:
    """Rows for `parametrize`: those that `fast` refuses are marked `slow`.

    A row is one value, or a tuple of values that `fast` takes one by one.
    """
    marked = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        marks = () if fast(*values) else pytest.mark.slow
        marked.append(pytest.param(*values, marks=marks))
    return marked
