"""Find a smallest set that is enough, with few trials."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# Up to so many, each is left out in turn: bisection would not take fewer trials if half are needed.
_FEW = 16


def smallest(items: Sequence[T], is_enough: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """A subset that is enough, and of which nothing can be left out.

    That is so if more is never worse: whatever contains a set that is enough is enough. The last
    member of the shortest beginning of the list that is enough must be in the set; so one member
    after the other is found by bisection. For `m` members of `n` items that takes about
    `m * log2(n)` trials, and fewer if the members come early in the list.

    Args:
        items: All of them together are enough.
        is_enough: Whether some of them are.
    """
    if len(items) <= _FEW:
        return _without_needless(items, is_enough)
    found: tuple[T, ...] = ()
    pool = tuple(items)
    while not is_enough(found):
        count = _shortest(pool, found, is_enough)
        found, pool = (*found, pool[count - 1]), pool[: count - 1]
    # As they are in the list.
    return tuple(item for item in items if item in found)


def _without_needless(
    items: Sequence[T], is_enough: Callable[[tuple[T, ...]], bool]
) -> tuple[T, ...]:
    if is_enough(()):
        return ()
    kept = tuple(items)
    for item in reversed(items):
        rest = tuple(other for other in kept if other != item)
        if rest and is_enough(rest):
            kept = rest
    return kept


def _shortest(
    pool: Sequence[T], found: tuple[T, ...], is_enough: Callable[[tuple[T, ...]], bool]
) -> int:
    """How many of a pool are enough at least, beside what was found; none of them are not."""
    low, high, guess = 0, len(pool), 1
    # Items are listed by promise: short beginnings first.
    while guess < len(pool) and guess <= _FEW:
        if is_enough((*found, *pool[:guess])):
            high = guess
            break
        low, guess = guess, 4 * guess
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough((*found, *pool[:middle])):
            high = middle
        else:
            low = middle
    return high
