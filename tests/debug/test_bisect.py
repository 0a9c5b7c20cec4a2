"""Which parts must stay wide."""

import inspect
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import Policy, debug
from halfstep.debug._compare.bisect import smallest

ALL_LOW = "f16,op:*=compute"
SCOPES = 64


def _planted(sensitive):
    """A loss of many scopes, of which some overflow in float16 inside them."""

    def loss(ws, x):
        for number, w in enumerate(ws):
            with jax.named_scope(f"layer_{number}"):
                x = x @ w
                if number in sensitive:
                    x = jnp.sqrt(jnp.square(x * 1000) + 1) / 1000
        return jnp.mean(x)

    return loss


def _batches(count=2, scopes=SCOPES):
    # Products, since XLA takes long for chains of elementwise operations.
    ws = [jnp.eye(2) * (1 + number / 4096) for number in range(scopes)]
    return [(ws, jnp.linspace(1, 2 + n, 8).reshape(4, 2)) for n in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("sensitive", [(17,), (3, 60), (0, 31, 63)])
def test_planted_scopes(sensitive):
    found = debug.bisect(
        _planted(sensitive), _batches(), ALL_LOW, tolerance=0.05, refine=False, progress=False
    )
    assert found.candidates >= 60
    assert {rule.scope for rule in found.rules} == {f"layer_{n}" for n in sensitive}
    assert found.before == np.inf
    assert found.error <= 0.05
    assert found.compiles <= 40
    assert found.policy.rules[-1] == halfstep.PrecisionRule.parse("op:*=compute")


@pytest.mark.slow
def test_operations_in_them(tmp_path):
    loss, batches = _planted((3, 10)), _batches(scopes=12)
    found = debug.bisect(loss, batches, ALL_LOW, tolerance=0.05, progress=False)
    assert {(rule.op, rule.scope) for rule in found.rules} == {
        (op, scope) for op in ("square", "add", "sqrt") for scope in ("layer_3", "layer_10")
    }
    assert found.compiles <= 40
    line = loss.__code__.co_firstlineno + 5
    assert {one.lines for one in found.needed} == {(f"test_bisect.py:{line}",)}
    assert found.wide >= 6
    # None of them can be left out.
    for left_out in found.rules:
        rules = [rule for rule in found.policy.rules if rule != left_out]
        policy = found.policy.replace(rules=rules)
        worse = debug.bisect(loss, batches[:1], policy, tolerance=np.inf, progress=False)
        assert worse.error > 0.05
    found.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == found.policy
    assert (tmp_path / "policy.toml").read_text().startswith("# Found by halfstep ")
    assert f"{found.wide} of {found.operations} operations" in str(found)
    assert "op:sqrt@layer_3=float32" in str(found)
    assert "<table" in found._repr_html_()
    assert repr(found) == str(found)
    assert json.loads(found.to_json())["compiles"] == found.compiles


def test_programs_are_forgotten():
    # Linux lets a process have 65,530 maps; XLA takes some for every program.
    def maps():
        with open("/proc/self/maps") as lines:
            return len(list(lines))

    counts = []
    for _ in range(3):
        debug.bisect(_planted((5,)), _batches(1, 8), "f16", tolerance=np.inf, progress=False)
        counts.append(maps())
    assert counts[2] - counts[1] < (counts[1] - counts[0] + 100) / 4


def test_nothing_is_needed():
    found = debug.bisect(_planted(()), _batches(1), "bf16", tolerance=0.1, progress=False)
    assert found.rules == ()
    assert found.policy == Policy.parse("bf16")
    assert found.error == found.before <= 0.1
    assert "nothing is needed" in str(found)


def test_out_of_reach():
    def loss(ws, x):
        return jnp.sum(jnp.log(x @ ws[0]))

    with pytest.raises(ValueError, match=r"an error of at most 0.01; .* it is 1\."):
        debug.bisect(loss, _batches(1), ALL_LOW, measure=lambda policy: 1.0, progress=False)
    bad = [jnp.eye(2)], jnp.zeros((2, 2))
    with pytest.raises(ValueError, match="not finite in float32 for batch 1"):
        debug.bisect(loss, [([jnp.eye(2)], jnp.ones((2, 2))), bad], ALL_LOW, progress=False)
    with pytest.raises(ValueError, match="at least one batch"):
        debug.bisect(loss, [], ALL_LOW, progress=False)


@pytest.mark.slow
def test_a_whole_step():
    def step(w, x):
        def loss(w):
            with jax.named_scope("square"):
                big = (x @ w * 1000) ** 2
            with jax.named_scope("mean"):
                return jnp.mean(big / 1e4)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    args = jnp.eye(4), jnp.linspace(0, 1, 8).reshape(2, 4)
    found = debug.bisect(step, [args], ALL_LOW, progress=False)
    assert found.before == np.inf
    assert {rule.scope for rule in found.rules} >= {"square"}
    exact, _ = jax.jit(step)(*args)
    low, _ = jax.jit(halfstep.autocast(step, found.policy))(*args)
    assert jnp.linalg.norm(low - exact) <= 0.01 * jnp.linalg.norm(exact)


def test_another_measure():
    asked = []

    def measure(policy):
        asked.append(policy)
        wide = [rule for rule in policy.rules if rule.outcome == "float32"]
        scopes = ("layer_5", "layer_6")
        operations = [halfstep.Operation("dot_general", scope, {}, (), ()) for scope in scopes]
        return sum(not any(rule.matches(one) for rule in wide) for one in operations) / 2

    found = debug.bisect(
        _planted(()), _batches(1, 8), ALL_LOW, tolerance=0.0, measure=measure, progress=False
    )
    assert {(rule.op, rule.scope) for rule in found.rules} == {
        ("dot_general", "layer_5"),
        ("dot_general", "layer_6"),
    }
    # Each program once, and the one that says which rules to try first.
    assert len(asked) + 1 == found.compiles


@pytest.mark.slow
def test_which_products_can_stay_in_8_bits():
    keys = jax.random.split(jax.random.key(0), 3)
    ws = {name: jax.random.normal(key, (32, 32)) / 6 for name, key in zip("abc", keys, strict=True)}

    # Rows of very different size, most of which vanish in 8 bits.
    sizes = 2.0 ** jnp.arange(32.0)
    ws["b"] = sizes[:, None] * ws["b"]

    def loss(ws, x):
        for name in "abc":
            with jax.named_scope(name):
                x = (x / sizes[None] if name == "b" else x) @ ws[name]
        return jnp.mean(x**2)

    batch = ws, jax.random.normal(jax.random.key(1), (16, 32))
    found = debug.bisect(loss, [batch], "f8", tolerance=0.15, progress=False)
    assert [str(rule) for rule in found.rules] == ["op:dot_general@b=compute"]
    assert (found.operations, found.wide) == (3, 1)
    delayed = debug.bisect(loss, [batch], "f8-delayed", tolerance=0.15, progress=False)
    assert delayed.rules == found.rules


def test_names_that_rules_cannot_hold():
    def loss(w, x):
        return jnp.sum(jnp.einsum("ab,bc->ac", x, w) ** 2)

    args = jnp.full((4, 4), 300.0), jnp.full((4, 4), 300.0)
    found = debug.bisect(loss, [args], ALL_LOW, progress=False)
    assert "op:dot_general@ab?bc->ac=float32" in map(str, found.rules)
    assert Policy.parse(str(found.policy)) == found.policy


@pytest.mark.slow
def test_modules():
    model = eqx.nn.MLP(
        4, 1, 8, 2, activation=lambda x: jnp.square(100 * x) / 1e4, key=jax.random.key(0)
    )

    def loss(model, x):
        made = jax.vmap(model)(x)
        return jnp.mean(made), made

    x = 10 * jax.random.normal(jax.random.key(1), (2, 4))
    found = debug.bisect(loss, [(model, x)], ALL_LOW, has_aux=True, progress=False)
    assert any(rule.op == "square" for rule in found.rules)
    assert found.error <= 0.01


@pytest.mark.parametrize("needed", [(), (0,), (99,), (3, 50), (0, 1, 2, 97, 98, 99), range(100)])
def test_the_search(needed):
    trials = []

    def is_enough(chosen):
        trials.append(chosen)
        return set(needed) <= set(chosen)

    assert smallest(range(100), is_enough) == tuple(needed)
    assert len(trials) <= 1 + len(needed) * 11


def test_the_search_of_alternatives():
    # Any two of one parity are enough: of such a pair nothing can be left out.
    def is_enough(chosen):
        return any(sum(n % 2 == parity for n in chosen) >= 2 for parity in (0, 1))

    found = smallest(range(10), is_enough)
    assert len(found) == 2
    assert is_enough(found)


def test_arguments_that_are_no_list_of_calls():
    message = r"is a list of the arguments of each call.*first entry is a dict"
    with pytest.raises(TypeError, match=message):
        inspect.unwrap(debug.bisect)(lambda p, x: x, ({"w": 1.0}, jnp.ones(2)), "f16")
