"""Arrays in low precision on many devices: each has its own part, and none asks another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from halfstep import quant
from halfstep.quant import groups_for


@pytest.mark.parametrize(
    ("code", "shape", "spec", "random"),
    [
        ("int8", (128, 64), P("data"), True),
        ("int8", (64, 96), P("data"), False),
        ("root8", (64, 128), P(None, "data"), True),
        ("root8", (64, 40), P("data"), False),
        ("int4", (128, 64), P("data"), True),
        ("root4", (64, 96), P("data"), False),
        ("f8", (128, 64), P("data"), False),
        ("rootf8", (3, 64, 128), P(None, None, "data"), False),
    ],
)
def test_sharded_arrays(code: str, shape: tuple[int, ...], spec: P, random: bool, mesh: Mesh):
    """Nothing crosses devices, and codes and scales lie where the values lie."""
    sharding = NamedSharding(mesh, spec)
    whole = np.random.default_rng(0).standard_normal(shape).astype(np.float32) ** 2
    value = jax.device_put(jnp.asarray(whole), sharding)
    parts = tuple(4 if name == "data" else 1 for name in (*spec, None, None)[: len(shape)])
    groups = groups_for(shape, shards=parts)
    assert groups is not None

    def there(value: jax.Array, key: jax.Array) -> quant.Quantized:
        return quant.quantize(value, code, groups=groups, key=key if random else None)

    def back(stored: quant.Quantized) -> jax.Array:
        return quant.dequantize(stored, code, groups=groups, shape=shape)

    compiled = jax.jit(there).lower(value, jax.random.key(0)).compile()
    stored = compiled(value, jax.random.key(0))
    returned = jax.jit(back).lower(stored).compile()
    for program in (compiled, returned):
        text = program.as_text() or ""
        assert "fusion" in text or "call" in text
        for collective in ("all-", "collective", "reduce-scatter"):
            assert collective not in text
    for array in (*stored, returned(stored)):
        assert array.sharding.is_equivalent_to(sharding, len(shape))
    alone = jax.jit(there)(jnp.asarray(whole), jax.random.key(0))
    assert (np.asarray(alone.codes) == np.asarray(stored.codes)).all()
    assert (np.asarray(alone.scale) == np.asarray(stored.scale)).all()


def test_a_collective_would_be_seen(mesh: Mesh):
    """Groups that lie on two devices need them to talk."""
    value = jax.device_put(jnp.ones((64, 96)), NamedSharding(mesh, P("data")))
    across = quant.Groups(-2)
    compiled = jax.jit(lambda value: quant.quantize(value, groups=across)).lower(value).compile()
    text = compiled.as_text() or ""
    assert "all-" in text or "collective" in text
