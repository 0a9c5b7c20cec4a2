"""Products of experts in compiled programs: which of them multiply blocks with their scales."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import halfstep
from halfstep._autocast.f8 import product
from halfstep._autocast.f8.experts import padded
from tests.preflight._compilers import need, own_cache as own_cache

GROUPS, ROWS, WIDTH, HIDDEN = 4, 2048, 256, 512
pytestmark = pytest.mark.usefixtures("own_cache")


def loss(params: Any, x: Any, sizes: Any) -> Any:
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x @ params["first"], params["up"], sizes))
    return jnp.mean(jax.lax.ragged_dot(hidden, params["down"], sizes) ** 2)


MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))


def compiled(target: str, policy: str, *, inside: bool = False) -> Any:
    """The gradient; on several GPUs each has its rows, and its groups if it is inside a map."""
    several = target.endswith(":8")
    params = {
        "first": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        "up": jax.ShapeDtypeStruct((GROUPS, WIDTH, HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((GROUPS, HIDDEN, WIDTH), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((8 * ROWS if several else ROWS, WIDTH), jnp.float32)
    sizes = jax.ShapeDtypeStruct((8 * GROUPS if inside else GROUPS,), jnp.int32)
    recipe, state = halfstep.RECIPES.get(policy), None
    if recipe is not None and recipe.needs_state:
        one = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)
        state = recipe.init(loss, params, x, one, calibrate=False, key=jax.random.key(0))

    def step(state: Any, params: Any, x: Any, sizes: Any) -> Any:
        grads = halfstep.filter_grad(loss, state, policy=policy)(params, x, sizes)[-1]
        return jax.lax.pmean(grads, "data") if inside else grads

    specs = (P(), P(), P("data"), P("data") if inside else P())
    if inside:
        step = jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=False)
    over = {"mesh": MESH, "shardings": specs} if several else {}
    given = (state, params, x, sizes)
    return halfstep.preflight(step, given, targets=target, progress=False, **over).entries[0]


NATIVE = [
    pytest.param("b200", "mxfp8", "float8_e4m3fn", id="mxfp8"),
    pytest.param("b200", "nvfp4", "float4_e2m1fn", id="nvfp4", marks=pytest.mark.slow),
    pytest.param("b200", "f8-block", "float8_e4m3fn", id="f8-block", marks=pytest.mark.slow),
    pytest.param("h100", "f8-block", "float8_e4m3fn", id="h100", marks=pytest.mark.slow),
]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="f8-block and nvfp4 take JAX 0.12")
@pytest.mark.parametrize(("target", "policy", "element"), NATIVE)
def test_all_products_are_native(target: str, policy: str, element: str):
    """One product without groups has two legs, and two with groups have three."""
    need("cuda")
    entry = compiled(target, policy)
    assert (entry.f8.count, entry.f8.total, entry.f8.eligible) == (8, 8, 1.0)
    assert {p.lhs.partition("[")[0] for p in entry.products} == {element}
    lines = collections.Counter()
    for found in entry.products:
        assert found.source.startswith("test_experts.py:")
        lines[found.source] += found.count
    assert sum(lines.values()) == 8
    rows = (
        2 * ROWS * WIDTH * WIDTH * 2 + 6 * 2 * padded(ROWS, GROUPS, WIDTH, HIDDEN) * WIDTH * HIDDEN
    )
    assert entry.contraction_flops() == {element: rows}


@pytest.mark.slow
def test_decoded_products_are_counted(monkeypatch: pytest.MonkeyPatch):
    need("cuda")
    monkeypatch.setattr(product, "roles_of", lambda *_: None)
    entry = compiled("b200", "mxfp8")
    assert (entry.f8.count, entry.f8.total) == (2, 8)
    missed = [found for found in entry.products if found.of_recipe and not found.in_f8]
    assert {found.why_not for found in missed} == {
        "the recipe rounds to 8 or 4 bits and multiplies in bfloat16"
    }


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mxfp8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_native_on_every_device(policy: str):
    need("cuda")
    entry = compiled("b200:8", policy, inside=True)
    assert (entry.f8.count, entry.f8.total) == (8, 8)
    assert entry.hlo.count('custom_call_target="__cudnn$blockScaledDot"') == 8


@pytest.mark.slow
def test_decoded_where_the_compiler_divides():
    need("cuda")
    entry = compiled("b200:8", "mxfp8")
    assert (entry.f8.count, entry.f8.total) == (2, 8)
