"""One program of another package under every policy, by numbers."""

import importlib.metadata
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import halfstep
from halfstep._program.control_flow import equations
from tests.ecosystem._programs import Example

CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
POINTS = 3
TRIES = 24
"""Steps after which a loss scale that began too high has become small enough."""


class Subject:
    """A program as a function of its arrays, and its gradient in float32 at some points.

    One gradient is one sample of a rounding error, and another point of the same program may have
    half of it or twice as much: so errors are medians over some points.

    Args:
        example: The program.
    """

    def __init__(self, example: Example) -> None:
        loss, params, self.data = example.make()
        params, rest = eqx.partition(params, eqx.is_inexact_array_like)
        self.params = jax.tree.map(jnp.asarray, params)

        def function(params: Any, *data: Any) -> Any:
            return loss(eqx.combine(params, rest), *data)

        self.loss = function
        run = jax.jit(jax.value_and_grad(function))
        self.points = [self.params, *(_near(self.params, seed) for seed in range(1, POINTS))]
        made = [run(params, *self.data) for params in self.points]
        self.value, self.gradients = made[0][0], [gradient for _, gradient in made]

    def error(self, gradient: Any, point: int) -> float:
        """By how much a gradient differs from that in float32, as a share of its size."""
        difference, size = 0.0, 0.0
        for ours, theirs in zip(
            jax.tree.leaves(gradient), jax.tree.leaves(self.gradients[point]), strict=True
        ):
            wide = np.complex128 if np.iscomplexobj(theirs) else np.float64
            exact = np.asarray(theirs).astype(wide)
            difference += float(np.sum(np.abs(np.asarray(ours).astype(wide) - exact) ** 2))
            size += float(np.sum(np.abs(exact) ** 2))
        return float(np.sqrt(difference / size)) if size else float(np.sqrt(difference))


def _near(params: Any, seed: int) -> Any:
    """Parameters that are a few percent away."""
    random = np.random.RandomState(seed)

    def moved(leaf: jax.Array) -> jax.Array:
        factor = 1 + 0.05 * random.randn(*leaf.shape)
        return leaf * jnp.asarray(factor, leaf.real.dtype)

    return jax.tree.map(moved, params)


def gradient_error(subject: Subject, policy: str) -> float:
    """The median error of a gradient under a policy, with loss scaling for float16."""
    scaled = policy.startswith("f16")
    scaling = halfstep.DynamicLossScaling() if scaled else halfstep.NoLossScaling()

    @jax.jit
    def step(params: Any, scaling: Any, *data: Any) -> Any:
        gradient = halfstep.filter_value_and_grad(subject.loss, scaling, policy=policy)
        return gradient(params, *data)

    errors = []
    for point, params in enumerate(subject.points):
        made: Any = None
        for _ in range(TRIES):
            _, scaling, verdict, made = step(params, scaling, *subject.data)
            # Without a loss scale there is nothing that a second try would change.
            if not scaled or bool(verdict):
                break
        errors.append(subject.error(made, point))
    return float(np.median(errors))


def runs_in_16_bits(subject: Subject) -> bool:
    """Whether the program stays in 16 bits where only its inputs are cast.

    Many promote back to float32, so that casting inputs rounds weights and changes little else.
    """
    low = halfstep.cast_tree((subject.params, *subject.data), "bf16")
    program = jax.make_jaxpr(subject.loss)(*low)
    dtypes = [
        {str(getattr(atom.aval, "dtype", "")) for atom in equation.invars[:2]}
        for equation in equations(program.jaxpr)
        if equation.primitive.name in CONTRACTIONS
    ]
    return 2 * dtypes.count({"bfloat16"}) >= len(dtypes)


def tracing_ratio(subject: Subject, rounds: int = 3) -> float:
    """How much longer tracing takes under `autocast`, the fastest of some rounds."""

    def traced(function: Callable[..., Any]) -> float:
        jax.clear_caches()
        start = time.process_time()
        jax.jit(jax.value_and_grad(function)).trace(subject.params, *subject.data)
        return time.process_time() - start

    low = halfstep.autocast(subject.loss, "bf16")
    pairs = [(traced(subject.loss), traced(low)) for _ in range(rounds)]
    return min(ours for _, ours in pairs) / min(bare for bare, _ in pairs)


def planted_fault(subject: Subject) -> str:
    """What `first_nonfinite` names where the largest parameter is near the end of the range."""
    leaves, tree = jax.tree.flatten(subject.params)
    largest = max(range(len(leaves)), key=lambda number: leaves[number].size)
    leaves[largest] = jnp.sign(leaves[largest]) * np.asarray(3e38, leaves[largest].dtype)
    function = jax.value_and_grad(halfstep.autocast(subject.loss, "bf16"))
    found = halfstep.debug.first_nonfinite(
        function, jax.tree.unflatten(tree, leaves), *subject.data
    )
    return "nothing" if found is None else f"{found.site.op} at {found.site.source}"


def measure(
    example: Example, *, fault: bool = True, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All figures of one program; where one cannot be had, why.

    Args:
        example: The program.
        fault: Whether a fault is planted and looked for as well.
        known: Figures of an earlier run, which are not measured again.
    """
    begun = time.process_time()
    subject = Subject(example)
    row: dict[str, Any] = {"name": example.name, "package": example.package}
    row |= {"version": importlib.metadata.version(example.package), "jax": jax.__version__}
    row |= {"loss": float(subject.value), "seconds": {}, **(known or {}), "note": example.note}
    row["seconds"].setdefault("f32", round(time.process_time() - begun, 2))

    def attempt(name: str, figure: Callable[[], Any]) -> None:
        if name in row:
            return
        begun = time.process_time()
        try:
            row[name] = figure()
        except Exception as error:
            row[name] = _said(error)
        row["seconds"][name] = round(time.process_time() - begun, 2)

    attempt("bf16", lambda: gradient_error(subject, "bf16"))
    attempt("bf16_inputs", lambda: gradient_error(subject, "bf16:inputs"))
    attempt("inputs_run_low", lambda: runs_in_16_bits(subject))
    attempt("f16", lambda: gradient_error(subject, "f16"))
    attempt("f8", lambda: gradient_error(subject, "f8"))
    attempt("share", lambda: _share(subject))
    attempt("tracing", lambda: tracing_ratio(subject))
    if fault:
        attempt("fault", lambda: planted_fault(subject))
    return row


def _share(subject: Subject) -> float:
    return float(halfstep.explain(subject.loss, "bf16")(subject.params, *subject.data).totals.low)


def _said(error: Exception) -> str:
    """An error in short, without the folder in which packages are installed."""
    text = re.sub(r"(?:/[^\s/]+)+/site-packages/", "", str(error).strip())
    return f"{type(error).__name__}: {text}"[:300]
