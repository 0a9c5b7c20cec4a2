"""Functions that composed programs name: wrappers, loops, and arithmetics of a matrix product.

A composed program is written once, as `program(C, p, x, rows, target)`. `C` is one of the classes
here and says how its matrix products, `C.mm` and `C.einsum`, are computed and how its activations,
`C.act`, are held.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.fuzz._program import with_jvp, with_vjp

Step = Callable[..., tuple[Any, Any]]
"""From parameters, a carry and one row to the next carry and what is made of the row."""


# Arithmetics.


class Plain:
    """The dtype of the arguments: float32 for halfstep, float64 for the oracle."""

    def mm(self, a: Any, b: Any) -> Any:
        """Return the matrix product of the last axis of `a` and the matrix `b`."""
        return a @ b

    def einsum(self, equation: str, a: Any, b: Any) -> Any:
        """Return a product by its equation."""
        return jnp.einsum(equation, a, b)

    def act(self, value: Any) -> Any:
        """Return a value that is an activation, and not state."""
        return value

    def carry(self, carry: Any) -> Any:
        """Return what an iteration hands to the next one; errors are planted here."""
        return carry


class ByHand(Plain):
    """As an expert writes it: products of a half dtype, and everything else as it is."""

    def __init__(self, half: Any) -> None:
        self.half = half

    def round(self, value: Any) -> Any:
        """Round a value to the half dtype, and its cotangent, too."""
        return value.astype(self.half).astype(value.dtype)

    def mm(self, a: Any, b: Any) -> Any:
        return self.act(self.round(a) @ self.round(b))

    def einsum(self, equation: str, a: Any, b: Any) -> Any:
        return self.act(jnp.einsum(equation, self.round(a), self.round(b)))

    def act(self, value: Any) -> Any:
        return self.round(value)


class Either(ByHand):
    """By hand or exact, as a flag says: if it is traced, the two are one compiled program."""

    def __init__(self, half: Any, is_rounded: Any) -> None:
        super().__init__(half)
        self.is_rounded = is_rounded

    def round(self, value: Any) -> Any:
        if isinstance(self.is_rounded, bool):
            return super().round(value) if self.is_rounded else value
        return jnp.where(self.is_rounded, super().round(value), value)


# Wrappers of a step and of a stage.


def branched(step: Step) -> Step:
    """Return a step that runs in one of two equal branches."""

    def run(q: Any, h: Any, t: Any) -> tuple[Any, Any]:
        return lax.cond(t["k"] < 2, step, jax.jit(step), q, h, t)

    return run


def guarded(step: Step) -> Step:
    """Return a step that a branch leaves out for some rows."""

    def run(q: Any, h: Any, t: Any) -> tuple[Any, Any]:
        return lax.cond(t["m"], step, lambda q, h, t: (h, jnp.zeros_like(t["u"])), q, h, t)

    return run


def selected(step: Step) -> Step:
    """Return a step whose carry is thrown away for some rows."""

    def run(q: Any, h: Any, t: Any) -> tuple[Any, Any]:
        made, y = step(q, h, t)
        return jax.tree.map(lambda new, old: jnp.where(t["m"], new, old), made, h), y

    return run


def twice(step: Step) -> Step:
    """Return a step that runs twice for each row, in a loop."""

    def run(q: Any, h: Any, t: Any) -> tuple[Any, Any]:
        h, y = lax.scan(lambda h, _: step(q, h, t), h, None, length=2)
        return h, y[-1]

    return run


def mapped(step: Step, axis: int, carry: int) -> Step:
    """Return a step of one example as a step of a batch."""

    def run(q: Any, h: Any, t: Any) -> tuple[Any, Any]:
        axes = {**dict.fromkeys(t, None), "u": axis}
        t = {**t, "u": jnp.moveaxis(t["u"], 0, axis)}
        over = jax.vmap(step, in_axes=(None, carry, axes), out_axes=(carry, axis))
        h, y = over(q, h, t)
        return h, jnp.moveaxis(y, axis, 0)

    return run


def mapped_stage(stage: Step, axis: int, batch: int) -> Step:
    """Return a stage of one example as a stage of a batch, which is the second axis of rows.

    Args:
        stage: From parameters and rows to a last carry and rows.
        axis: The axis of rows that is mapped.
        batch: The axis of the last carry along which a batch lies.
    """

    def run(q: Any, u: Any, rows: Any) -> tuple[Any, Any]:
        over = jax.vmap(stage, in_axes=(None, axis, None), out_axes=(batch, axis))
        h, y = over(q, jnp.moveaxis(u, 1, axis), rows)
        return h, jnp.moveaxis(y, axis, 1)

    return run


def mapped_program(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program of one example as a program of a batch."""

    def run(C: Any, p: Any, x: Any, rows: Any, target: Any) -> Any:
        axes = (None, 1, None, target.ndim - 2)
        losses, outs = jax.vmap(functools.partial(program, C), in_axes=axes)(p, x, rows, target)
        return jnp.mean(losses), outs

    return run


def recomputed_program(program: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a program under `jax.checkpoint`."""

    def run(C: Any, *values: Any) -> Any:
        return jax.checkpoint(functools.partial(program, C), **options)(*values)

    return run


def jitted_program(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program under `jax.jit`."""

    def run(C: Any, *values: Any) -> Any:
        return jax.jit(functools.partial(program, C))(*values)

    return run


# Loops: from a step, a carry and rows to the last carry and the rows that are made.


def by_scan(step: Step, q: Any, h: Any, t: Any, **options: Any) -> tuple[Any, Any]:
    """Run a step over rows by a scan."""
    return lax.scan(lambda h, t: step(q, h, t), h, t, **options)


def by_two_scans(step: Step, q: Any, h: Any, t: Any, outer: int) -> tuple[Any, Any]:
    """Run a step over rows by a scan in a scan."""
    chunks = jax.tree.map(lambda a: a.reshape(outer, -1, *a.shape[1:]), t)
    h, y = lax.scan(lambda h, t: by_scan(step, q, h, t), h, chunks)
    return h, y.reshape(-1, *y.shape[2:])


def by_fori(step: Step, q: Any, h: Any, t: Any) -> tuple[Any, Any]:
    """Run a step over rows by a loop that keeps what it makes in a buffer."""

    def body(i: Any, carry: Any) -> Any:
        h, y = step(q, carry[0], jax.tree.map(lambda a: a[i], t))
        return h, carry[1].at[i].set(y)

    return lax.fori_loop(0, len(t["m"]), body, (h, jnp.zeros_like(t["u"])))


def by_while(step: Step, q: Any, h: Any, t: Any) -> tuple[Any, Any]:
    """Run a step over rows by a loop without a number of iterations."""

    def body(carry: Any) -> Any:
        i, h, rows = carry
        h, y = step(q, h, jax.tree.map(lambda a: a[i], t))
        return i + 1, h, rows.at[i].set(y)

    first = (jnp.asarray(0, "int32"), h, jnp.zeros_like(t["u"]))
    return lax.while_loop(lambda carry: carry[0] < len(t["m"]), body, first)[1:]


def rms(value: Any) -> Any:
    """Return rows that are not much larger than one, whose derivative is not, either."""
    # With a tiny number in place of the one, a row with a single number that is not zero would have
    # a derivative that cancels, and its error would say nothing.
    return value * lax.rsqrt(jnp.mean(value**2, axis=-1, keepdims=True) + 1.0)


NAMES = {
    "branched": branched,
    "by_fori": by_fori,
    "by_scan": by_scan,
    "by_two_scans": by_two_scans,
    "by_while": by_while,
    "checkpoint_name": checkpoint_name,
    "functools": functools,
    "guarded": guarded,
    "jax": jax,
    "jitted_program": jitted_program,
    "jnp": jnp,
    "lax": lax,
    "mapped": mapped,
    "mapped_program": mapped_program,
    "mapped_stage": mapped_stage,
    "policies": jax.checkpoint_policies,
    "recomputed_program": recomputed_program,
    "rms": rms,
    "selected": selected,
    "twice": twice,
    "with_jvp": with_jvp,
    "with_vjp": with_vjp,
}
"""What the text of a composed program may name."""
