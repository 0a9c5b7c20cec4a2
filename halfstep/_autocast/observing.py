"""Let a tool see the calls of rewritten functions, wherever in a program they are.

A training step calls `autocast` deep inside, under `jax.grad` and `jit`, and a tool is given only
the step. While the tool traces the step, every call of a rewritten function is shown to it here.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar

from jax.typing import ArrayLike

from halfstep._autocast.plans import Plan
from halfstep._autocast.tracing import TracedCall

Observer = Callable[[TracedCall, Sequence[ArrayLike]], Sequence[ArrayLike]]
"""Takes a call and its arrays, and returns the arrays that the call continues with."""

_observer: ContextVar[Observer | None] = ContextVar("halfstep_observer", default=None)


@contextlib.contextmanager
def observed(observer: Observer) -> Generator[None]:
    """Show all calls that are traced in this context to an observer."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@contextlib.contextmanager
def collected_plans() -> Generator[list[Plan]]:
    """Collect the plans of all calls that are traced in this context, in their order."""
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
