"""The names that each module of `halfstep.compat` shows, and no others."""

import importlib

import pytest


@pytest.mark.parametrize("name", ["flashoptim_jax", "jaxamp", "jmp", "mpfj", "mpx"])
def test_a_module_shows_its_own_names(name: str):
    module = importlib.import_module(f"halfstep.compat.{name}")
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, shown) for shown in module.__all__)
