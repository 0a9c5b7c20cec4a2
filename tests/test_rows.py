"""Which rows of a test run on every change."""

import types
from typing import Any

import pytest

from tests._rows import spread
from tests.conftest import pytest_collection_modifyitems as mark_rows


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [0]), (2, [0, 9]), (3, [0, 4, 9]), (4, [0, 3, 6, 9]), (10, list(range(10)))],
)
def test_spread(count: int, expected: list[int]):
    assert spread(range(10), count) == expected
    assert spread(range(3), 4) == [0, 1, 2]


class Item:
    """As much of a test as the hook looks at."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator):
        self.nodeid, self.marks = nodeid, {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark.mark


@pytest.mark.parametrize(
    ("option", "fast"),
    [(None, ["a[0]", "a[4]", "b[0]", "b[1]", "c"]), (1, ["a[0]", "b[0]", "c"])],
)
def test_rows_beyond_the_limit_are_slow(option: int | None, fast: list[str]):
    items: Any = [
        *(Item(f"a[{number}]", pytest.mark.rows(2)) for number in range(5)),
        *(Item(f"b[{number}]") for number in range(2)),
        Item("b[2]", pytest.mark.slow),
        Item("c"),
    ]
    config: Any = types.SimpleNamespace(option=types.SimpleNamespace(rows=option))
    mark_rows(config, items)
    assert [item.nodeid for item in items if not item.get_closest_marker("slow")] == fast
