"""`halfstep.compat.mpfj`: the names of MPfJ's README, which are mpx's and one more."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from halfstep.compat import mpfj, mpx

# As MPfJ's README and its first code name them.
README = {
    "cast_to_half_precision",
    "cast_to_full_precision",
    "force_full_precision",
    "filter_grad",
    "cond_update",
}


def test_every_name_of_the_readme_is_here():
    assert set(dir(mpfj)) >= README


def test_all_other_names_are_mpx_s():
    own = set(dir(mpfj)) - {"cond_update"}
    assert {name for name in own if getattr(mpfj, name) is not getattr(mpx, name)} == set()


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("finite", [True, False])
def test_cond_update_updates_if_gradients_are_finite(finite: bool):
    params, optimizer = {"w": jnp.ones(2)}, optax.adam(0.1)
    state = optimizer.init(params)
    updated, after = mpfj.cond_update(params, optimizer, state, params, jnp.asarray(finite))
    assert np.array_equal(updated["w"], params["w"]) is not finite
    assert int(optax.tree_utils.tree_get(after, "count")) == int(finite)
