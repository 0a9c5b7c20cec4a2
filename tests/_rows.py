"""Which rows of a matrix of tests are run on every change; the others are `slow`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

_T = TypeVar("_T")


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


def spread(rows: Sequence[_T], count: int) -> list[_T]:
    """So many of the rows, evenly spread, the first and the last among them."""
    if count >= len(rows):
        return list(rows)
    step = (len(rows) - 1) / max(count - 1, 1)
    return [rows[round(number * step)] for number in range(count)]
