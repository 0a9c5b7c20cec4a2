"""The ledger and its limit."""

import jax
import jax.numpy as jnp
import pytest

import halfstep
from halfstep import DynamicLossScaling, Ledger, SkipLimitError, Verdict

pytestmark = [pytest.mark.core, pytest.mark.types, pytest.mark.wheel]


def counts(ledger: Ledger) -> tuple[int, ...]:
    return tuple(int(x) for x in (ledger.applied, ledger.skipped, ledger.consecutive))


def test_counts():
    ledger = Ledger()
    assert (*counts(ledger), int(ledger.last_skipped)) == (0, 0, 0, -1)
    for finite in (True, False, False, True, False):
        ledger = ledger.record(jnp.asarray(finite))
    assert counts(ledger) == (2, 3, 1)
    assert int(ledger.last_skipped) == 4
    assert int(ledger.steps) == 5


def test_under_jit_scan_and_donation():
    flags = jnp.asarray([True, False, False, True, False])
    scanned, _ = jax.lax.scan(lambda s, f: (s.record(f), None), Ledger(limit=7), flags)
    assert counts(scanned) == (2, 3, 1)
    assert scanned.limit == 7
    step = jax.jit(Ledger.record, donate_argnums=0)
    ledger = Ledger()
    for flag in flags:
        ledger = step(ledger, flag)
    assert counts(ledger) == (2, 3, 1)


def test_an_unchecked_verdict_counts_as_applied():
    assert counts(Ledger().record(Verdict(None, None, None))) == (1, 0, 0)


def test_limit_says_what_to_look_at():
    params = {"bias": jnp.ones(2), "weight": jnp.ones(2)}

    def loss(params, x):
        return jnp.sum(params["weight"] * x) + jnp.sum(params["bias"])

    def run(x, steps):
        ledger, scaling = Ledger(limit=3), DynamicLossScaling()
        for _ in range(steps):
            scaling, finite, _ = halfstep.filter_grad(loss, scaling, policy="f16:inputs")(params, x)
            ledger = ledger.record(finite)
        return ledger, scaling

    overflow, scaling = run(jnp.array([40000.0, 1.0]), 2)
    overflow.check()
    overflow, scaling = run(jnp.array([40000.0, 1.0]), 3)
    with pytest.raises(
        SkipLimitError,
        match=r"(?s)3 steps in a row.*limit 3.*0 applied and 3 skipped.*last skipped one is step 2"
        r".*`weight`.*scale is 4096.*loss was finite each time",
    ):
        overflow.check(params, scaling=scaling)
    with pytest.raises(SkipLimitError, match="leaf that was not finite is number 1"):
        overflow.check()
    bad_data, _ = run(jnp.full(2, jnp.nan), 3)
    with pytest.raises(SkipLimitError, match=r"(?s)In 3 of the skipped steps the loss.*the batch"):
        bad_data.check()


def test_no_limit_never_raises():
    ledger = Ledger()
    for _ in range(100):
        ledger = ledger.record(False)
    ledger.check()


def test_errors():
    with pytest.raises(ValueError, match="`limit` must be None or an integer, 1 or more"):
        Ledger(limit=0)
    with pytest.raises(TypeError, match="required a boolean scalar or the verdict"):
        Ledger().record(jnp.ones(2))


def test_what_is_printed_has_the_numbers():
    ledger = halfstep.Ledger(limit=3).record(False)
    assert "applied=0" in repr(ledger)
    assert "skipped=1" in str(ledger)
    assert "limit=3" in repr(ledger)
    scaling = halfstep.DynamicLossScaling(2**10)
    assert "loss_scaling=1024.0" in repr(scaling)
    verdict = halfstep.Verdict(jnp.asarray(False), jnp.asarray(True), jnp.asarray(3))
    assert "finite=False" in repr(verdict)
    assert "first_leaf=3" in repr(verdict)
    # Inside of a program they are not known.
    shown = []
    jax.jit(lambda ledger: shown.append(repr(ledger)))(ledger)
    assert "applied=i32[]" in shown[0]
    many = jax.vmap(lambda ok: halfstep.Ledger().record(ok))(jnp.array([True, False]))
    assert "applied=i32[2]" in repr(many)
