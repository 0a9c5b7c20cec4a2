"""Rules for what is kept for the backward pass: by operation, scope and line."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import Policy, StoreRule
from halfstep._autocast.stored.int4 import BLOCK, pack, unpack
from tests._jaxprs import equations
from tests.autocast.test_stores import HIDDEN, LAYERS, ROWS, WIDTH, dots, over_layers, saved, start
from tests.f8.test_frameworks import cosine, flat

pytestmark = [pytest.mark.core, pytest.mark.types]

RULES = {
    "store:op:dot_general=keep": 0.9999,
    "store:op:dot_general=e4m3": 0.999,
    "store:scope:**/mlp=e4m3": 0.999,
    "store:op:dot_general=int4": 0.99,
    "store:op:dot_general=recompute": 0.9999,
}
UP = "op:dot_general@**/mlp"


def loss_of(*, scan: bool = True, remat: bool = False) -> Any:
    def layer(x: Any, params: Any) -> Any:
        with jax.named_scope("mlp"):
            hidden = jax.nn.gelu(x @ params["up"])
        return x + hidden @ params["down"], None

    body = jax.checkpoint(layer, prevent_cse=not scan) if remat else layer
    return over_layers(body, scan=scan)


def step(loss: Any, policy: str) -> Any:
    return jax.jit(jax.value_and_grad(halfstep.autocast(loss, policy)))


@pytest.mark.rows(1)
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_stay(rule: str, scan: bool):
    params, x = start()
    loss = loss_of(scan=scan)
    value, exact = step(loss, "bf16")(params, x)
    same, grads = step(loss, f"bf16,{rule}")(params, x)
    # The forward pass is the same, bit for bit.
    assert value == same
    assert cosine(flat(grads), flat(exact)) >= RULES[rule]


@pytest.mark.rows(1)
@pytest.mark.parametrize("remat", [False, True])
def test_what_is_stored(remat: bool):
    params, x = start()
    loss = loss_of(remat=remat)
    count = LAYERS * ROWS * HIDDEN

    def kept(rule: str) -> dict[str, int]:
        return saved(halfstep.autocast(loss, f"bf16,store:{UP}={rule}"), params, x)

    none, eight, four = kept("recompute"), kept("e4m3"), kept("int4")
    own = none.get("bfloat16", 0)
    assert kept("keep")["bfloat16"] == own + 2 * count
    assert eight["float8_e4m3fn"] == count
    assert four["uint8"] == count // 2
    # An offset and a step for each block, of two bytes.
    assert four["bfloat16"] == own + 2 * 2 * count // BLOCK


def test_recomputing_costs_products_and_storing_none():
    params, x = start()
    plain = dots(step(loss_of(), "bf16"), params, x)
    counts = {
        rule: dots(step(loss_of(), f"bf16,store:{UP}={rule}"), params, x)
        for rule in ("keep", "e4m3", "recompute")
    }
    assert counts == {"keep": plain, "e4m3": plain, "recompute": plain + 1}


def test_offload_moves_16_bits_to_the_host():
    params, x = start()
    func = jax.grad(halfstep.autocast(loss_of(), f"bf16,store:{UP}=offload"))
    moved = [
        equation.outvars[0].aval
        for equation in equations(jax.make_jaxpr(func)(params, x))
        if equation.primitive.name == "device_put"
    ]
    assert {str(aval.dtype) for aval in moved} == {"bfloat16"}
    assert {aval.shape for aval in moved} == {(ROWS, HIDDEN)}


def test_by_line():
    def loss(w: Any, x: Any) -> Any:
        first = jnp.tanh(x @ w)
        return jnp.mean(jnp.tanh(first @ w) ** 2)

    line = loss.__code__.co_firstlineno + 1
    w, x = jnp.eye(WIDTH), start()[1]
    kept = saved(halfstep.autocast(loss, f"bf16,store:line:test_store_rules.py:{line}=e4m3"), w, x)
    assert kept["float8_e4m3fn"] == ROWS * WIDTH


def test_by_number():
    """Layers that a loop of Python's writes out have the same lines."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    line = loss.__code__.co_firstlineno + 2
    w, x = jnp.eye(WIDTH), start()[1]

    def stored(*rules: str) -> int:
        kept = saved(halfstep.autocast(loss, ",".join(["bf16", *rules])), w, x)
        return kept.get("float8_e4m3fn", 0) // (ROWS * WIDTH)

    assert stored("store:op:dot_general#2=e4m3") == 1
    assert stored("store:op:dot_general#0=e4m3", "store:op:dot_general#3=e4m3") == 2
    assert stored(f"store:op:dot_general@line:test_store_rules.py:{line}#1=e4m3") == 1
    # The first rule that matches is used, and numbers count all operations.
    assert stored("store:op:dot_general#1=keep", "store:op:dot_general=e4m3") == 3
    with pytest.raises(ValueError, match=r"'store:op:dot_general#4=e4m3' is for nothing in this"):
        stored("store:op:dot_general#4=e4m3")


def test_by_the_line_of_a_call():
    def dense(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    def loss(w: Any, x: Any) -> Any:
        first = dense(w, x)
        second = dense(w, first)
        return jnp.mean(dense(w, second) ** 2)

    first, helper = loss.__code__.co_firstlineno + 1, dense.__code__.co_firstlineno + 1
    w, x = jnp.eye(WIDTH), start()[1]
    file = "test_store_rules.py"
    for rule, count in (
        (f"store:line:{file}:{first}=e4m3", 1),
        (f"store:op:dot_general@line:{file}:{first}=e4m3", 1),
        (f"store:line:{file}:{helper}=e4m3", 3),
        # The first rule that matches: the call's line, and the helper's for the other two.
        (f"store:line:{file}:{first}=recompute,store:line:{file}:{helper}=e4m3", 2),
    ):
        kept = saved(halfstep.autocast(loss, f"bf16,{rule}"), w, x)
        assert kept["float8_e4m3fn"] == count * ROWS * WIDTH, rule
    with pytest.raises(ValueError, match="is for nothing"):
        halfstep.autocast(loss, f"bf16,store:op:sin@line:{file}:{first}=keep")(w, x)


def test_a_function_with_a_derivative_of_its_own():
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jax.nn.relu(x @ w) @ w) ** 2)

    w, x = jnp.eye(WIDTH), start()[1]
    rule = "bf16,store:op:custom_jvp_call=e4m3,store:op:dot_general=recompute"
    kept = saved(halfstep.autocast(loss, rule), w, x)
    assert kept["float8_e4m3fn"] == ROWS * WIDTH
    plain = jax.grad(halfstep.autocast(loss, "bf16"))(w, x)
    grads = jax.grad(halfstep.autocast(loss, rule))(w, x)
    assert cosine(flat(grads), flat(plain)) >= 0.999


FORMS = ["bf16,store:op:dot_general=keep", "bf16,store:op:dot_general=e4m3", "bf16,residuals=e4m3"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inner", ["scan", "checkpoint"])
def test_what_a_derivative_rule_makes_of_tangents_has_no_store(inner: str, form: str):
    dots = jax.checkpoint_policies.dots_saveable

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (layer(x, w), None), x, length=2)[0]

    inside = looped if inner == "scan" else jax.checkpoint(layer, policy=dots)
    own = jax.custom_jvp(inside)
    own.defjvp(lambda primals, tangents: jax.jvp(inside, primals, tangents))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.checkpoint(own, policy=dots)(x, w) ** 2)

    w, x = 0.5 * jnp.eye(WIDTH), start()[1]
    plain = jax.grad(halfstep.autocast(loss, "bf16"))(w, x)
    np.testing.assert_array_equal(jax.grad(halfstep.autocast(loss, form))(w, x), plain)


def test_under_vmap_and_with_effects():
    params, x = start()
    seen: list[float] = []

    def loss(params: Any, x: Any) -> Any:
        made = loss_of()(params, x)
        jax.debug.callback(lambda value: seen.append(float(value)), made)
        return made * 2

    policy = "bf16,store:op:dot_general=e4m3"
    value, grads = step(loss, policy)(params, x)
    jax.effects_barrier()
    assert seen == [float(value) / 2]
    many = jax.jit(jax.vmap(jax.grad(halfstep.autocast(loss_of(), policy)), (None, 0)))(
        params, jnp.stack([x, x])
    )
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    for one, two in zip(jax.tree.leaves(grads), jax.tree.leaves(many), strict=True):
        atol = eps * float(jnp.abs(one).max())
        np.testing.assert_allclose(2 * two[1], one, rtol=eps, atol=atol)


def test_branches_loops_and_refs():
    def loss(w: Any, x: Any) -> Any:
        count = jax.new_ref(jnp.zeros(()))
        x = jax.lax.cond(jnp.sum(x) > 0, lambda x: jnp.tanh(x @ w), lambda x: x @ w, x)
        count[...] += 1.0
        x = jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ w), x)
        return jnp.mean(x**2) * count[...]

    w, x = jnp.eye(WIDTH) * 0.9, start()[1]
    value, exact = step(loss, "bf16")(w, x)
    same, grads = step(loss, "bf16,store:op:dot_general=e4m3")(w, x)
    assert value == same
    assert cosine(grads.ravel(), exact.ravel()) >= 0.999


def test_second_derivatives_of_what_is_kept_or_recomputed():
    params, x = start()

    def slope(params: Any, policy: str) -> Any:
        grads = jax.grad(halfstep.autocast(loss_of(), policy))(params, x)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))

    exact = jax.grad(slope)(params, "bf16")
    for rule in ("keep", "recompute"):
        grads = jax.grad(slope)(params, f"bf16,store:op:dot_general={rule}")
        assert cosine(flat(grads), flat(exact)) >= 0.999
    with pytest.raises(TypeError, match="no second derivative"):
        jax.grad(slope)(params, "bf16,store:op:dot_general=e4m3")


def test_a_rule_for_nothing_is_an_error():
    params, x = start()
    for rule in ("store:scope:attention=e4m3", "store:op:sin=keep", "store:line:a.py:1=int4"):
        with pytest.raises(ValueError, match=f"{rule}' is for nothing"):
            halfstep.autocast(loss_of(), f"bf16,{rule}")(params, x)


@pytest.mark.parametrize("outcome", ["keep", "recompute"])
def test_a_rule_for_everything_is_no_error_where_there_is_nothing(outcome: str):
    low = halfstep.autocast(lambda w: jnp.broadcast_to(w, (3, 2)), f"bf16,store:op:*={outcome}")
    np.testing.assert_array_equal(low(jnp.ones(2)), jnp.ones((3, 2)))


def test_as_text_and_as_a_file(tmp_path: pathlib.Path):
    rules = (
        "store:op:dot_general@**/mlp=int4",
        "store:scope:head=offload",
        "store:line:m.py:3=keep",
        "store:op:add@line:m.py:4=keep",
        "store:scope:head@line:m.py:5=e5m2",
        "store:op:add@head@line:a/m.py:6=recompute",
        "store:op:add#0=keep",
        "store:op:add@head@line:a/m.py:6#12=recompute",
    )
    policy = Policy(compute="bf16", stores=rules)
    assert policy.stores[0] == StoreRule("int4", op="dot_general", scope="**/mlp")
    assert Policy.parse(str(policy)) == policy
    assert str(policy) == "p=f32,c=bf16,o=f32," + ",".join(rules)
    policy.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "store:op:dot_general=int3",
            "the outcome of a rule for saved activations is one of keep, e4m3",
        ),
        ("store:dot_general=keep", "a rule for saved activations is a text such as"),
        ("store:scope:a@b=keep", "a rule for saved activations is a text such as"),
        ("store:line:m.py:1@line:m.py:2=keep", "a rule for saved activations is a text such as"),
        ("store:line:m.py=keep", "a line is written as a file and a number"),
        ("store:op:add#x=keep", "a rule for saved activations is a text such as"),
        ("store:scope:mlp#1=keep", "number= counts operations of a name; got number=1 without one"),
    ],
)
def test_wrong_rules(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        Policy.parse(f"bf16,{text}")
    with pytest.raises(ValueError, match="`stores` is for autocast to 16 bits"):
        Policy(compute="f32", stores=("store:op:dot_general=keep",))


def test_what_is_not_a_rule_is_said():
    with pytest.raises(TypeError, match=r"`stores` is a sequence of rules; write stores=\('store"):
        Policy(compute="bf16", stores="store:op:dot_general=keep")
    with pytest.raises(TypeError, match="`stores` of `Policy` must be a sequence, each a StoreR"):
        Policy(compute="bf16", stores=(1,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Give op=, scope= or line=; op="):
        StoreRule("keep")
    with pytest.raises(ValueError, match="number= must be an integer, 0 for the first"):
        StoreRule("keep", op="add", number=-1)
    with pytest.raises(
        ValueError, match="`residuals` is for autocast to 16 bits; got residuals='e"
    ):
        Policy(compute="f32", residuals="e4m3")


def test_four_bits_and_what_is_masked():
    value = jax.random.normal(jax.random.key(0), (8, 128)).astype(jnp.bfloat16)
    value = value.at[0, :BLOCK].set(-jnp.inf).at[1, 3].set(-jnp.inf).at[2].set(7)
    back = unpack(pack(value), np.dtype(jnp.bfloat16))
    assert (jnp.isinf(back) == jnp.isinf(value)).all()
    blocks = jnp.where(jnp.isinf(value), 0, value).astype(jnp.float32).reshape(8, -1, BLOCK)
    span = blocks.max(-1, keepdims=True) - blocks.min(-1, keepdims=True)
    off = jnp.abs(
        jnp.where(jnp.isinf(back), 0, back).astype(jnp.float32).reshape(blocks.shape) - blocks
    )
    # Half a step, and the roundings of the offset and of the result.
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    assert (off <= span / 14 * (0.5 + 14 * eps) + 2 * eps * jnp.abs(blocks).max()).all()


def test_numbers_that_have_no_code_are_kept_as_they_are():
    """Complex numbers and integers, under a rule for everything."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.abs(jnp.fft.fft(x @ w)) ** 2)

    w, x = jnp.ones((64, 64)) / 8, jnp.ones((32, 64))
    want = jax.grad(halfstep.autocast(loss, "bf16"))(w, x)
    got = jax.grad(halfstep.autocast(loss, "bf16,store:op:*=e4m3"))(w, x)
    # Ones times a power of two are exact in 8 bits.
    np.testing.assert_allclose(got, want, rtol=2.0**-7)
