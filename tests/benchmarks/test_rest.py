"""Bits that flip in a state at rest: planted as said, and missed ones are counted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import rest
from benchmarks._hardening import rest_text
from halfstep.reliability import StateDigests, rest_check


def state() -> dict[str, Any]:
    return {"w": jnp.ones((4, 4), jnp.bfloat16), "is": jnp.array([True]), "key": jax.random.key(0)}


def bits(array: jax.Array) -> np.ndarray:
    data = np.asarray(jax.random.key_data(array) if rest.is_key(array) else array)
    return np.unpackbits(np.ascontiguousarray(data).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("name", state())
def test_one_bit_is_flipped(name: str):
    array = state()[name]
    changed = rest.flip(array, process=0, random=np.random.default_rng(0))
    assert changed.dtype == array.dtype
    assert np.sum(bits(changed) != bits(array)) == 1
    assert np.array_equal(
        bits(rest.flip(array, process=1, random=np.random.default_rng(0))), bits(array)
    )


def test_a_planted_flip_is_found():
    digests, random = rest_check(state()), np.random.default_rng(0)
    assert [rest.plant(state(), digests, random, number) for number in range(20)] == [None] * 20


def test_a_flip_that_is_not_found_is_said(monkeypatch: pytest.MonkeyPatch):
    digests = rest_check(state())

    def blind(state: Any, digests: StateDigests, *, step: int) -> StateDigests:
        return digests

    monkeypatch.setattr(rest, "rest_check", blind)
    said = rest.plant(state(), digests, np.random.default_rng(0), 3)
    assert said is not None
    assert said.endswith("of process 0 was not found")


def test_missed_flips_are_counted():
    row = {
        "mode": "fsdp",
        "policy": "f16",
        "optimizer": "adamw",
        "steps": 9,
        "flips": 7,
        "processes": 4,
    }
    row |= {"missed": ["flip 3"], "ratios": {"1": 1.5}}
    text = rest_text({"rows": [row], "traffic": []})
    assert "7 bits were flipped, one at a time; 1 were not found" in text
    assert "6 of 7" in text


@pytest.mark.slow
def test_four_processes():
    found = rest.run_case("fsdp", "f8", "flash", processes=4, steps=4, flips=24)
    assert found["missed"] == []
    assert found["flips"] == 24
