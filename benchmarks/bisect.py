"""What `debug.bisect` finds: planted scopes, and what a ViT in float16 needs.

    python -m benchmarks.bisect --json FILE

Planted: a function of 64 scopes, of which one, two or three overflow in float16. The ViT: images of
0 to 255 as they are, all operations in float16; it is trained as such, with what bisect finds on
two batches before the first step, with the table of operations, and in float32. Every operation is
rounded as it is written. The exit status is 1 if a bar is missed. Needs `halfstep[examples]` and
Fashion-MNIST.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array
from tqdm import tqdm

from benchmarks._report import parser, report, table, write
from examples._data import FASHION_MNIST, load_fashion_mnist
from halfstep import (
    DynamicLossScaling,
    NoLossScaling,
    Policy,
    debug,
    filter_value_and_grad,
    optimizer_update,
)
from tests.models import vit as _vit

MODULE = "benchmarks.bisect"
NARROW = "f16,op:*=compute"
SCOPES = 64
PLANTED = ((17,), (3, 60), (0, 31, 63))
COMPILES = 40
SIZES = {"patch": 7, "width": 64, "hidden": 128, "heads": 4, "blocks": 2}
BATCH = 32
# How far the training loss of a policy that trains may be from float32's.
TRAINS = 0.02


def planted(sensitive: Sequence[int], scopes: int = SCOPES) -> dict[str, Any]:
    """What bisect finds among many scopes."""

    def loss(weights: list[Array], x: Array) -> Array:
        for number, weight in enumerate(weights):
            with jax.named_scope(f"layer_{number}"):
                x = x @ weight
                if number in sensitive:
                    x = jnp.sqrt(jnp.square(x * 1000) + 1) / 1000
        return jnp.mean(x)

    weights = [jnp.eye(2) * (1 + number / 4096) for number in range(scopes)]
    batches = [(weights, jnp.linspace(1, 2 + n, 8).reshape(4, 2)) for n in range(2)]
    found = debug.bisect(loss, batches, NARROW, tolerance=0.05, refine=False, progress=False)
    names = {str(rule.scope) for rule in found.rules}
    return {
        "planted": len(sensitive),
        "scopes": scopes,
        "found": sorted(names),
        "is_right": names == {f"layer_{number}" for number in sensitive},
        "compiles": found.compiles,
    }


def images() -> Callable[[int], tuple[Array, Array]]:
    """Batches of images of 0 to 255, and their labels."""
    data = load_fashion_mnist(FASHION_MNIST)

    def batch(number: int) -> tuple[Array, Array]:
        part = slice(BATCH * number, BATCH * (number + 1))
        labels = jnp.asarray(data.train_labels[part], jnp.int32)
        return jnp.asarray(data.train_images[part], jnp.float32), labels

    return batch


def train(model: _vit.ViT, policy: Policy, batch: Callable[..., Any], steps: int) -> dict[str, Any]:
    """Loss of the last fifth of the steps, and how many were skipped."""
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    is_narrow = policy.compute == jnp.float16
    scaling = DynamicLossScaling() if is_narrow else NoLossScaling()

    def step(model: Any, state: Any, scaling: Any, *data: Array) -> Any:
        gradient = filter_value_and_grad(_vit.loss, scaling, policy=policy, check_finite=True)
        value, scaling, finite, grads = gradient(model, *data)
        model, state = optimizer_update(model, optimizer, state, grads, finite)
        return model, state, scaling, value, finite

    options: Any = {"compiler_options": {"xla_allow_excess_precision": False}}
    compiled = eqx.filter_jit(step, **options)
    values, skipped = [], 0
    for number in tqdm(range(steps), desc=str(policy)[:40], leave=False):
        model, state, scaling, value, finite = compiled(model, state, scaling, *batch(number))
        values.append(float(value))
        skipped += not finite
    return {"loss": statistics.mean(values[-max(1, steps // 5) :]), "skipped": skipped}


def vit(steps: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The ViT in each policy, and what bisect says."""
    batch = images()
    model = _vit.ViT(image=28, channels=1, classes=10, **SIZES, key=jax.random.key(0))
    batches = [(model, *batch(number)) for number in range(2)]
    found = debug.bisect(_vit.loss, batches, NARROW, tolerance=0.02)
    policies = {
        "float32": Policy.parse("f32"),
        "all in float16": Policy.parse(NARROW),
        "what bisect finds": found.policy,
        "float16 by the table": Policy.parse("f16"),
    }
    rows = [
        {"policy": name, **train(model, policy, batch, steps)} for name, policy in policies.items()
    ]
    return rows, {**found.to_dict(), "steps": steps}


def bars(rows: Sequence[dict[str, Any]], trained: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """What has to hold."""
    made = {
        f"{row['planted']} planted among {row['scopes']}: found with at most {COMPILES} compiles": (
            row["is_right"] and row["compiles"] <= COMPILES
        )
        for row in rows
    }
    losses = {row["policy"]: row["loss"] for row in trained}
    exact = losses["float32"]
    off = {name: abs(loss - exact) / exact for name, loss in losses.items()}
    # NaN is not within anything.
    made["all in float16, the ViT does not train"] = not off["all in float16"] <= TRAINS
    made["with what bisect finds, it does"] = off["what bisect finds"] <= TRAINS
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--steps", type=int, default=100, help="of training")
    parsed = options.parse_args(argv)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    rows = [planted(sensitive) for sensitive in tqdm(PLANTED, desc="planted")]
    trained, found = vit(parsed.steps)
    results = {"planted": rows, "vit": trained, "found": found, "bars": bars(rows, trained)}
    for made in (rows, trained):
        print(table(made, {name: name for name in made[0]}), file=sys.stderr)
    for bar, met in results["bars"].items():
        print("met   " if met else "MISSED", bar, file=sys.stderr)
    write(report(MODULE, results, packages=("optax",)), parsed.json)
    return 0 if all(results["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
