"""State at rest and arithmetic: any bit that flips is found, and nothing else is."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import halfstep
from halfstep import optim
from halfstep.reliability import ReplayError, RestError, replay_check, rest_check


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def state_of(kind: str) -> dict[str, Any]:
    """What a run has: parameters, optimizer state in low precision, scaling, ledger, keys."""
    weights = {"w": jax.random.normal(jax.random.key(0), (64, 32)), "b": jnp.ones(32)}
    optimizer = optim.flash_adamw(1e-3)
    params, state = optimizer.prepare(weights)
    whole = {
        "params": params,
        "state": state,
        "adam": optax.adam(1e-3).init(weights),
        "scaling": halfstep.DynamicLossScaling(),
        "ledger": halfstep.Ledger(),
        "key": jax.random.key(3),
        "name": "not an array",
    }
    if kind == "one device":
        return whole

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        is_divided = kind == "FSDP" and leaf.ndim == 2 and leaf.shape[0] % 2 == 0
        return jax.device_put(leaf, NamedSharding(mesh(), P("fsdp") if is_divided else P()))

    return jax.tree.map(place, whole)


def flipped(array: jax.Array, random: np.random.Generator) -> jax.Array:
    """The array with one bit of one shard on one device changed."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = flipped(jax.random.key_data(array), random)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    shards = array.addressable_shards
    chosen = int(random.integers(len(shards)))
    parts = []
    for number, shard in enumerate(shards):
        part = np.array(shard.data)
        if number == chosen:
            raw = part.reshape(-1).view(np.uint8)
            bit = int(random.integers(8 * raw.size)) if part.dtype != bool else 8 * (raw.size // 2)
            raw[bit // 8] ^= 1 << bit % 8
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.mark.rows(2)
@pytest.mark.parametrize("kind", ["one device", "data parallel", "FSDP"])
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(kind: str, count: int):
    state, random = state_of(kind), np.random.default_rng(count)
    digests = rest_check(state)
    leaves, structure = jax.tree.flatten(state)
    numbers = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and leaf.size]
    sizes = np.asarray([max(leaves[n].size, 1) for n in numbers], float)
    found = 0
    for number in range(count):
        # Half of them in any array alike, half in any element.
        even = number % 2 == 0
        at = int(random.choice(numbers, p=None if even else sizes / sizes.sum()))
        changed = jax.tree.unflatten(structure, leaves)
        listed = jax.tree.leaves(changed)
        listed[at] = flipped(leaves[at], random)
        try:
            rest_check(jax.tree.unflatten(structure, listed), digests, step=number)
        except RestError:
            found += 1
    assert found == count


def test_what_has_not_changed_is_left_alone():
    state = state_of("FSDP")
    digests = rest_check(state)
    for step in range(20):
        digests = rest_check(jax.tree.map(lambda x: x, state), digests, step=step)
    # The sign of a zero and the bits of a NaN count.
    odd = {"x": jnp.array([0.0, jnp.nan])}
    rest_check(odd, rest_check(odd))


def test_the_message_names_array_and_device():
    where = NamedSharding(mesh(), P("fsdp"))
    state = {"model": {"w": jax.device_put(jnp.zeros((4, 4)), where)}}
    digests = rest_check(state)
    shards = [np.array(shard.data) for shard in state["model"]["w"].addressable_shards]
    shards[2][0, 0] = -0.0
    devices = [shard.device for shard in state["model"]["w"].addressable_shards]
    parts = [jax.device_put(part, device) for part, device in zip(shards, devices, strict=True)]
    bad = jax.make_array_from_single_device_arrays((4, 4), where, parts)
    match = rf"before step 8 while .*: `model/w` on device {devices[2].id} of process 0\. Go back"
    with pytest.raises(RestError, match=match):
        rest_check({"model": {"w": bad}}, digests, step=8)


def test_many_are_counted():
    state = {f"w{number}": jnp.ones(number + 1) for number in range(9)}
    digests = rest_check(state)
    with pytest.raises(RestError, match=r"`w4` on device 0 of process 0; 4 more\. Go back"):
        rest_check(jax.tree.map(lambda x: 2 * x, state), digests)


def test_a_traced_state_has_digests_of_whole_arrays():
    state = {"w": jnp.arange(6.0), "key": jax.random.key(1)}
    digests = jax.jit(rest_check)(state)
    assert digests.names == ("key", "w")
    rest_check(state, digests, step=1)
    with pytest.raises(RestError, match="`w` on device 0 of process 0"):
        rest_check({**state, "w": state["w"].at[3].set(-3.0)}, digests)
    with pytest.raises(TypeError, match=r"compared on the host; got a traced state\. Take digests"):
        jax.jit(rest_check)(state, digests)


def test_preflight_says_what_a_check_reads():
    sizes = {"w": (256, 1024), "m": (1024, 512)}
    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    (entry,) = halfstep.preflight(rest_check, (state,), targets="v5e").entries
    expected = 4 * sum(a * b for a, b in sizes.values())
    assert entry.traffic_bytes is not None
    assert expected <= entry.traffic_bytes <= 1.01 * expected


def test_digests_of_another_state_are_refused():
    digests = rest_check({"a": jnp.ones(2)})
    with pytest.raises(ValueError, match="digests are of another state: they differ in a, b"):
        rest_check({"b": jnp.ones(2)}, digests)
    moved = jax.device_put(jnp.ones(2), NamedSharding(mesh(), P()))
    with pytest.raises(ValueError, match="they differ in arrays on other devices"):
        rest_check({"a": moved}, digests)


def test_arithmetic_that_goes_wrong_is_found():
    gradient = jax.jit(jax.grad(lambda w, x: jnp.mean((x @ w) ** 2)))
    w, x = jnp.ones((4, 2)), jnp.ones((3, 4))
    good = replay_check(gradient, w, x)
    np.testing.assert_array_equal(good, gradient(w, x))
    calls = itertools.count()

    def now_and_then(w: Any, x: Any) -> Any:
        wrong = next(calls) == 1
        return {"w": gradient(w, x).at[1, 1].add(2.0**-20 if wrong else 0.0)}

    with pytest.raises(ReplayError, match="step 8 has been computed twice, with other bits in `w`"):
        replay_check(now_and_then, w, x, step=8)
