"""How far a program is from float64, and how far it may be."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import halfstep
from tests.loops._loop import SPELLINGS, Arrays, ByHand, Products, Program, Whole
from tests.loops._rows import ROWS

POLICIES = ("bf16", "f16")
FLOORS: Mapping[str, float] = MappingProxyType({"bf16": 2e-3, "f16": 3e-4})
"""Errors that are allowed whatever the expert's are: about one rounding of a result."""
TIMES = 4.0
"""As many of the expert's errors are allowed."""
LOSS_SCALES: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"bf16": (1.0,), "f16": (256.0, 16.0, 1.0)}
)
"""The first at which the expert's gradients are finite is that of a row."""

COMPARED = ("state", "outputs", "gradient", "tangent")

Found = Mapping[str, Any]
"""Final state, stacked outputs, and gradients or tangents, as trees of NumPy's arrays."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The errors of one row."""

    row: str
    spelling: str
    policy: str
    has_loop: bool
    errors: Mapping[str, float]
    """By what is compared: the state, the outputs, the gradient or the tangent."""
    by_hand: Mapping[str, float]

    def bound(self, what: str) -> float:
        return max(TIMES * self.by_hand[what], FLOORS[self.policy])

    @property
    def wrong(self) -> list[str]:
        """Everything that is further from float64 than it may be."""
        # Not `>`: a NaN is wrong.
        return [what for what, error in self.errors.items() if not error <= self.bound(what)]

    @property
    def worst(self) -> str:
        """The one of the errors that is the largest part of its bound."""
        parts = {what: error / self.bound(what) for what, error in self.errors.items()}
        return max(parts, key=lambda what: np.inf if np.isnan(parts[what]) else parts[what])

    @property
    def text(self) -> str:
        if not self.has_loop:
            return "measured"
        return f"WRONG: {', '.join(self.wrong)}" if self.wrong else "exact"


def judge(row: str, spelling: str, policy: str) -> Verdict:
    """Compare a row through `autocast` with float64."""
    program = program_of(row)

    def ours(params: Arrays, data: Arrays) -> Any:
        return program.run(Products(), params, data, spelling)

    forward = is_forward(spelling)
    exact, (by_hand, scale) = oracle(row, forward), expert(row, policy, forward)
    found = evaluated(program, halfstep.autocast(ours, policy), forward=forward, scale=scale)
    compared = [what for what in COMPARED if found.get(what)]
    return Verdict(
        row,
        spelling,
        policy,
        not isinstance(program, Whole),
        {what: distance(found[what], exact[what]) for what in compared},
        {what: distance(by_hand[what], exact[what]) for what in compared},
    )


def is_forward(spelling: str) -> bool:
    return spelling in SPELLINGS and not SPELLINGS[spelling].has_gradient


# A row is evaluated by `scan` in float64 and by hand: other spellings are the same function.


@functools.cache
def program_of(row: str) -> Program:
    return ROWS[row]()


@functools.cache
def oracle(row: str, forward: bool) -> Found:
    """Evaluate in float64."""
    program = program_of(row)

    def plain(params: Arrays, data: Arrays) -> Any:
        return program.run(Products(), params, data, "scan")

    with jax.enable_x64(True):
        found = evaluated(program, plain, forward=forward, dtype=np.float64)
    for leaf in jax.tree.leaves(found):
        assert np.isfinite(leaf).all(), f"{row} is not finite in float64"
        assert leaf.dtype in (np.float64, np.complex128), f"{row} is not evaluated in float64"
    return found


@functools.cache
def expert(row: str, policy: str, forward: bool) -> tuple[Found, float]:
    """Evaluate as cast by hand; also return the loss scale."""
    program, products = program_of(row), ByHand(halfstep.FORMATS[policy].dtype)

    def by_hand(params: Arrays, data: Arrays) -> Any:
        return program.run(products, params, data, "scan")

    made, scale = {}, 1.0
    for scale in LOSS_SCALES[policy]:
        made = evaluated(program, by_hand, forward=forward, scale=scale)
        if all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(made)):
            break
    return made, scale


def evaluated(
    program: Program,
    func: Callable[[Arrays, Arrays], Any],
    *,
    forward: bool,
    scale: float = 1.0,
    dtype: Any = np.float32,
) -> Found:
    """Run a program with its derivative: `func` returns the loss, the state and the outputs."""

    def converted(arrays: Arrays) -> dict[str, Any]:
        floats = jnp.floating
        return {
            name: jnp.asarray(array, dtype if jnp.issubdtype(array.dtype, floats) else array.dtype)
            for name, array in arrays.items()
        }

    def scaled(params: Arrays, data: Arrays) -> Any:
        loss, rest = func(params, data)
        return loss * scale, rest

    @jax.jit
    def backward(params: Arrays, data: Arrays) -> Any:
        (_, (state, outs)), grads = jax.value_and_grad(scaled, has_aux=True)(params, data)
        made = {"state": inexact(state), "outputs": inexact(outs)}
        return {**made, "gradient": [grad / scale for grad in jax.tree.leaves(grads)]}

    @jax.jit
    def pushed(params: Arrays, data: Arrays) -> Any:
        # Along the parameters themselves: random signs would cancel where all terms are positive.
        state, tangent = jax.jvp(
            lambda params: inexact(func(params, data)[1][0]), (params,), (params,)
        )
        return {"state": state, "tangent": tangent}

    made = (pushed if forward else backward)(converted(program.params), converted(program.data))
    return jax.tree.map(np.asarray, made)


def inexact(tree: Any) -> list[Any]:
    """The leaves of a tree that are rounded."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def distance(found: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """The largest relative error of the leaves.

    A leaf of almost no norm is measured against a thousandth of the largest leaf's.
    """
    # A vmapped program has results with one more axis.
    leaves = [np.broadcast_to(leaf, mine.shape) for mine, leaf in zip(found, exact, strict=True)]
    norms = [float(np.linalg.norm(leaf.ravel())) for leaf in leaves]
    errors = [
        float(np.linalg.norm((mine.astype(leaf.dtype) - leaf).ravel()))
        / max(norm, 1e-3 * max(norms), np.finfo(np.float64).tiny)
        for mine, leaf, norm in zip(found, leaves, norms, strict=True)
    ]
    # Python's `max` would pass over a NaN.
    return float(np.max(errors))
