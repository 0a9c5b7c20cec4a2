"""flashoptim-jax: optimizers whose state is compressed, and nothing else."""

import importlib
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._peers import _jax, _probe

flashoptim_jax: Any = importlib.import_module("flashoptim_jax")

SHAPE = (1024, 1024)


def stored_bytes() -> _probe.Found:
    params = jnp.zeros(SHAPE, jnp.bfloat16)
    return _jax.stored((params, flashoptim_jax.flash_adamw(1e-3).init(params)), params.size)


def _steps(tx: Any, params: Any, state: Any, count: int) -> Any:
    for number in range(count):
        grads = jax.tree.map(lambda p, n=number: (p * 0 + 0.01 * (n + 1)).astype(p.dtype), params)
        params, state = tx.step(params, state, grads)
    return params, state


def checkpoint() -> _probe.Found:
    """By its own functions for it."""
    tx = flashoptim_jax.flash_adamw(1e-3, fused=False)
    params = {"w": jnp.linspace(0, 1, 4096, dtype=jnp.float32).astype(jnp.bfloat16).reshape(64, 64)}
    params, state = _steps(tx, params, tx.init(params), 3)
    ways: dict[str, Callable[[], Any]] = {
        "its dictionary, pickled": lambda: flashoptim_jax.load_flash_adamw_state_dict(
            pickle.loads(pickle.dumps(flashoptim_jax.flash_adamw_state_dict(state)))
        ),
        "arrays of its leaves": lambda: jax.tree.unflatten(
            jax.tree.structure(tx.init(params)),
            [jnp.asarray(np.asarray(leaf)) for leaf in jax.tree.leaves(state)],
        ),
    }
    expected = jax.tree.leaves(_steps(tx, params, state, 2))
    seen: dict[str, str] = {}
    for name, way in ways.items():

        def compare(name: str = name, way: Callable[[], Any] = way) -> None:
            got = jax.tree.leaves(_steps(tx, params, way(), 2))
            same = all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))
            seen[name] = "same bits" if same else "other bits"

        seen[name] = _probe.error_of(compare) or seen[name]
    good = sum(result == "same bits" for result in seen.values())
    shown = "; ".join(f"{name}: {result}" for name, result in seen.items())
    return _probe.count(good, len(ways), f"{shown[0].upper()}{shown[1:]}.")


def leaves() -> _probe.Found:
    """Its cast, of a tree with more than floating-point arrays."""
    tree = {"key": jax.random.key(0), "ids": jnp.array([2049]), "phase": jnp.array([1 + 3j])}
    made: list[Any] = []
    error = _probe.error_of(lambda: made.append(flashoptim_jax.cast_tree_bf16(tree)))
    if error is not None:
        return _probe.Found("no", f"A tree with a key, whole and complex numbers: {error}.")
    seen = {name: str(leaf.dtype) for name, leaf in made[0].items()}
    same = {name: str(leaf.dtype) for name, leaf in tree.items()}
    shown = ", ".join(f"{name} {dtype}" for name, dtype in seen.items())
    return _probe.decide(seen == same, f"`cast_tree_bf16`: {shown}.")


def newest() -> _probe.Found:
    """On a CPU, without its kernels."""
    tx = flashoptim_jax.flash_adamw(1e-3, fused=False)
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    error = _probe.error_of(lambda: _steps(tx, params, tx.init(params), 1))
    return _probe.decide(
        error is None, f"A step on JAX {jax.__version__}: {'runs' if error is None else error}."
    )


PROBES = {
    **_probe.absences(flashoptim_jax, "products", "carry", "branches", "sums", "shared"),
    **_probe.absences(flashoptim_jax, "statistics", "rules", *_probe.LOSS),
    **_probe.absences(flashoptim_jax, "why", "limit", "microbatches"),
    **_probe.absences(flashoptim_jax, "release", "memory", "bisect"),
    "fp8": lambda: _probe.absent(flashoptim_jax, "float8", "fp8", "dot"),
    "fp8_backward": lambda: _probe.absent(flashoptim_jax, "float8", "fp8", "dot"),
    "leaves": leaves,
    "stored_bytes": stored_bytes,
    "checkpoint": checkpoint,
    "newest": newest,
    "no_device": lambda: _probe.imports_without_a_device("flashoptim_jax"),
}

if __name__ == "__main__":
    _probe.report(PROBES, "flashoptim-jax", "jax", "optax")
