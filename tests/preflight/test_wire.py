"""What crosses the wires, read from programs for four H100s and four TPUs.

XLA:CPU widens what it sends, so that no run on a CPU can tell.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import halfstep
from halfstep import autocast
from tests._rows import slow_unless
from tests.preflight._compilers import need, own_cache as own_cache

pytestmark = pytest.mark.usefixtures("own_cache")
GPUS, TPUS = "h100:1x4", "v5e:2x2"
WIDTH, HIDDEN = 512, 2048
SUMS = ("all-reduce", "reduce-scatter")


def sharded(*, fsdp: bool, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """A step of two layers; parameters whole on every device, or in four parts."""
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def array(*shape: int, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    spec = P("data") if fsdp else P()
    params = {"up": array(WIDTH, HIDDEN, spec=spec), "down": array(HIDDEN, WIDTH, spec=spec)}

    def over_batch(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))

    def objective(params: Any, x: Any) -> Any:
        hidden = jax.nn.gelu(over_batch(x @ params["up"]))
        return jnp.mean(over_batch(hidden @ params["down"]) ** 2)

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(autocast(objective, **options))(params, x)
        return jax.tree.map(
            lambda p, g: jax.lax.with_sharding_constraint(p - 0.1 * g, NamedSharding(mesh, spec)),
            params,
            grads,
        )

    return step, (params, array(1024, WIDTH, spec=P("data")))


def sent(target: str, *, fsdp: bool, **options: Any) -> dict[tuple[str, str], int]:
    """How many matrices are sent, by kind and dtype. Verdicts and scales are less than one."""
    need("cuda" if target == GPUS else "tpu")
    step, args = sharded(fsdp=fsdp, **options)
    gemm = "library" if target == GPUS else "auto"
    (entry,) = halfstep.preflight(
        step, args, targets=target, donate_argnums=0, gemm=gemm, progress=False
    ).entries
    matrix = WIDTH * HIDDEN
    found = {
        (c.kind, c.dtype): c.bytes // (matrix * jnp.dtype(c.dtype).itemsize)
        for c in entry.collectives or ()
    }
    return {name: count for name, count in found.items() if count}


CASES = [
    ({"policy": "bf16"}, "bfloat16"),
    ({"policy": "bf16", "reduce_dtype": "f32"}, "float32"),
    ({"policy": "f16"}, "float32"),
    ({"policy": "f16", "reduce_dtype": "f16"}, "float16"),
    ({"policy": "f8"}, "bfloat16"),
    ({"policy": "f8", "reduce_dtype": "f32"}, "float32"),
]


def fast(target: str, fsdp: bool, options: dict[str, Any], dtype: str) -> bool:
    """A compile takes seconds: on every change each format in one of the two."""
    del dtype
    if target == TPUS:
        return fsdp and options == {"policy": "f8", "reduce_dtype": "f32"}
    return options != {"policy": "f8", "reduce_dtype": "f32"} and fsdp == (
        "reduce_dtype" not in options
    )


ROWS = [
    (target, fsdp, options, dtype)
    for target in (GPUS, TPUS)
    for options, dtype in CASES
    for fsdp in (False, True)
    # A TPU has no float16; its compiler sends pairs as integers.
    if (target, dtype) != (TPUS, "float16")
]


@pytest.mark.rows(1)
@pytest.mark.parametrize(("target", "fsdp", "options", "dtype"), slow_unless(ROWS, fast), ids=str)
def test_gradients(target: str, fsdp: bool, options: dict[str, Any], dtype: str):
    """All of them are summed in one dtype, and once."""
    found = sent(target, fsdp=fsdp, **options)
    sums = {name[1]: count for name, count in found.items() if name[0] in SUMS}
    assert sums == {dtype: 2}
    gathered = {name[1] for name in found if name[0] == "all-gather"}
    assert bool(gathered) == fsdp
    if fsdp and options["policy"] == "f8":
        # Weights travel in the 8 bits that are multiplied.
        assert gathered == {"float8_e4m3fn"}
