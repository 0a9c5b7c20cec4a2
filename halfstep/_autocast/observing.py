"""Let a tool see the calls of rewritten functions, wherever in a program they are.

A training step calls `autocast` deep inside, under `jax.grad` and `jit`, and a tool is given the
step alone. While the tool traces the step, every call of a rewritten function comes by here.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar

from jax.typing import ArrayLike

from halfstep._autocast.plans import Plan
from halfstep._autocast.tracing import TracedCall

Observer = Callable[[TracedCall, Sequence[ArrayLike]], Sequence[ArrayLike]]
"""Of a call and its arrays, the arrays that it goes on with."""

_observer: ContextVar[Observer | None] = ContextVar("halfstep_observer", default=None)


@contextlib.contextmanager
def observed(observer: Observer) -> Generator[None]:
    """Show all calls that are traced in here to an observer."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@contextlib.contextmanager
def collected_plans() -> Generator[list[Plan]]:
    """Collect the plans of all calls that are traced in here, in their order."""
    found: list[Plan] = []

    def observer(call: TracedCall, arrays: Sequence[ArrayLike]) -> Sequence[ArrayLike]:
        found.append(call.plan)
        return arrays

    with observed(observer):
        yield found


def observe(call: TracedCall, arrays: Sequence[ArrayLike]) -> Sequence[ArrayLike]:
    """Show a call to the observer, if there is one."""
    observer = _observer.get()
    return arrays if observer is None else observer(call, arrays)
