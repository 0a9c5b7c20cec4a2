"""Residual encodings, names and `jax.checkpoint` policies together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import halfstep
from tests._jaxprs import equations
from tests.f8.test_frameworks import cosine, flat

pytestmark = [pytest.mark.core, pytest.mark.types]

POLICIES = jax.checkpoint_policies
LAYERS, ROWS, WIDTH, HIDDEN = 3, 64, 32, 128
ENCODED = "bf16,residuals=e4m3"
DOTS = {
    "dots": POLICIES.dots_saveable,
    "no batch": POLICIES.dots_with_no_batch_dims_saveable,
    "names": POLICIES.save_only_these_names("up", "down"),
}


def start() -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)) / HIDDEN**0.5,
    }
    return params, jax.random.normal(keys[2], (ROWS, WIDTH))


def loss_of(policy: Any, *, scan: bool = True) -> Any:
    """A stack of layers, each in a `jax.checkpoint` with a policy."""

    def layer(x: Any, params: Any) -> Any:
        hidden = jax.nn.gelu(checkpoint_name(x @ params["up"], "up"))
        return x + checkpoint_name(hidden @ params["down"], "down"), None

    return over_layers(jax.checkpoint(layer, prevent_cse=not scan, policy=policy), scan=scan)


def over_layers(body: Any, *, scan: bool) -> Any:
    """The loss of a stack of layers: by a scan, or written out."""

    def loss(params: Any, x: Any) -> Any:
        x = 0.5 * x
        if scan:
            x, _ = jax.lax.scan(body, x, params)
        else:
            for number in range(LAYERS):
                x, _ = body(x, jax.tree.map(lambda stack, n=number: stack[n], params))
        return jnp.mean(x**2)

    return loss


def saved(func: Any, params: Any, x: Any) -> dict[str, int]:
    """The bytes that are kept for the backward pass and are not parameters, by dtype."""
    _, pull = jax.vjp(jax.jit(lambda params: func(params, x)), params)
    own = [leaf.shape for leaf in jax.tree.leaves(params)]
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(pull):
        if leaf.shape not in own:
            sizes[leaf.dtype.name] = sizes.get(leaf.dtype.name, 0) + leaf.nbytes
    return sizes


def dots(func: Any, *args: Any) -> int:
    """How many products the compiled program has; loops count once."""
    return func.lower(*args).compile().as_text().count(" dot(")


@pytest.mark.rows(1)
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("name", DOTS)
def test_what_a_policy_saves_is_encoded(name: str, scan: bool):
    params, x = start()
    loss = loss_of(DOTS[name], scan=scan)
    plain, encoded = (halfstep.autocast(loss, policy) for policy in ("bf16", ENCODED))
    before, after = (saved(func, params, x) for func in (plain, encoded))
    # What `up` makes is read by what is recomputed; nobody reads what `down` makes.
    # The stream begins in float32 and is in 16 bits after the first layer: written out, the input
    # of the last layer is kept in 16 bits, and the result, which the loss reads, like a residual.
    row, more = ROWS * WIDTH, 0 if scan else 1
    assert before["bfloat16"] == LAYERS * ROWS * HIDDEN * 2 + more * 2 * row * 2
    assert after["float8_e4m3fn"] == LAYERS * ROWS * HIDDEN + more * row
    assert after["bfloat16"] == LAYERS * ROWS * 2 + more * (row * 2 + ROWS * 2)
    steps = [jax.jit(jax.value_and_grad(func)) for func in (plain, encoded)]
    (value, exact), (same, grads) = (step(params, x) for step in steps)
    # The forward pass is the same, bit for bit, and nothing is computed more often.
    assert value == same
    assert cosine(flat(grads), flat(exact)) >= 0.999
    assert dots(steps[0], params, x) == dots(steps[1], params, x)


@pytest.mark.parametrize("policy", [None, POLICIES.nothing_saveable])
def test_what_is_recomputed_is_not_encoded(policy: Any):
    params, x = start()
    loss = loss_of(policy)
    programs = [
        jax.make_jaxpr(jax.grad(halfstep.autocast(loss, name)))(params, x)
        for name in ("bf16", ENCODED)
    ]
    counts = [
        sum(equation.primitive.name == "dot_general" for equation in equations(program))
        for program in programs
    ]
    assert counts[0] == counts[1]
    assert "f8_e4m3fn" not in str(programs[1])


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_named_values_are_kept_in_the_compute_dtype(policy: str):
    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, params: Any) -> Any:
            # A hyperbolic tangent is float32, and so would be what is saved of it. Float16 is known
            # to hold it.
            hidden = checkpoint_name(jnp.tanh(x @ params["up"]), "hidden")
            return x + hidden @ params["down"], None

        names = POLICIES.save_only_these_names("hidden")
        x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False, policy=names), x, params)
        return jnp.mean(x**2)

    params, x = start()
    kept = saved(halfstep.autocast(loss, policy), params, x)
    low = halfstep.FORMATS[policy].dtype.name
    assert kept[low] == LAYERS * ROWS * HIDDEN * 2


def test_a_named_loss_stays_float32():
    def loss(w: Any, x: Any) -> Any:
        return checkpoint_name(jnp.mean(jax.nn.softmax(x @ w)), "loss")

    params, x = start()
    program = jax.make_jaxpr(halfstep.autocast(loss, "bf16"))(params["up"][0], x)
    (named,) = [e for e in equations(program) if e.primitive.name == "name"]
    assert named.invars[0].aval.dtype == jnp.float32


@pytest.mark.parametrize(("policy", "dtype"), [("bf16", "bfloat16"), (ENCODED, "float8_e4m3fn")])
def test_what_is_offloaded_is_as_small(policy: str, dtype: str):
    offload = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["up"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    params, x = start()
    func = jax.grad(halfstep.autocast(loss_of(offload), policy))
    moved = [
        equation
        for equation in equations(jax.make_jaxpr(func)(params, x))
        if equation.primitive.name == "device_put"
    ]
    types = {str(var.aval.dtype) for equation in moved for var in equation.outvars}
    assert dtype in types
    assert "float32" not in types


def test_a_checkpoint_inside_another_one():
    params, x = start()
    inner = loss_of(POLICIES.dots_saveable)

    def loss(params: Any, x: Any) -> Any:
        return jax.checkpoint(inner, policy=POLICIES.dots_saveable)(params, x)

    steps = [
        jax.jit(jax.value_and_grad(halfstep.autocast(loss, policy))) for policy in ("bf16", ENCODED)
    ]
    (value, exact), (same, grads) = (step(params, x) for step in steps)
    assert value == same
    assert cosine(flat(grads), flat(exact)) >= 0.999


def test_under_vmap_and_shard_map():
    params, x = start()
    func = halfstep.autocast(loss_of(POLICIES.dots_saveable), ENCODED)
    alone = jax.jit(jax.grad(func))(params, x)
    many = jax.jit(jax.vmap(jax.grad(func), (None, 0)))(params, jnp.stack([x, x]))
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    for one, two in zip(jax.tree.leaves(alone), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(two[1], one, rtol=eps, atol=eps * float(jnp.abs(one).max()))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")

    def sharded(params: Any, x: Any) -> Any:
        return jax.lax.pmean(loss_of(POLICIES.dots_saveable)(params, x), "data")

    mapped = jax.shard_map(
        sharded, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=PartitionSpec()
    )
    grads = jax.jit(jax.grad(halfstep.autocast(mapped, ENCODED)))(params, x)
    assert cosine(flat(grads), flat(alone)) >= 1 - eps


def test_second_derivatives_are_refused():
    params, x = start()
    func = halfstep.autocast(loss_of(POLICIES.dots_saveable), ENCODED)

    def slope(params: Any) -> Any:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(jax.grad(func)(params, x)))

    with pytest.raises(TypeError, match="no second derivative"):
        jax.grad(slope)(params)
