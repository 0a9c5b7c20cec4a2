"""Keep the state of a recipe: what was seen of each product, and what sets its scales."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from halfstep._autocast import OFF, Settings, Slot, named_sites, rewritten, settings_of, trace
from halfstep._base import at_least_float32, checked, listed, type_of, without_key_type
from halfstep._policy import Policy, Recipe, as_policy, recipes_of, state_of
from halfstep._training.scaling import AbstractLossScaling, NoLossScaling
from halfstep._training.verdict import as_predicate
from halfstep.quant._scaled import power_of_two

T = TypeVar("T")


class SiteState(eqx.Module):
    """The state of one product; for a product in a loop, the state of each iteration.

    Attributes:
        history: The largest magnitudes of the activation, the weight and the gradient in the last
            steps, the newest first; empty without delayed scaling.
        seen: The largest magnitude of the same three in the last step, and the shares that were
            saturated and flushed to zero.
        degraded: The number of steps in a row in which too much was lost.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        w, x = jnp.ones((32, 64)), jnp.ones((16, 32))
        scaling = halfstep.RECIPES["f8"].init(lambda w, x: jnp.sum(x @ w), w, x)
        gradient = halfstep.filter_grad(lambda w, x: jnp.sum(x @ w), scaling, policy="f8")
        site = gradient(w, x)[0].sites["dot_general.0"]
        activation, weight, gradient = site.seen
        assert weight[0] == 1
        assert activation[1] == activation[2] == 0
        ```
    """

    history: Float32[Array, "*turns steps 3"]
    seen: Float32[Array, "*turns 3 3"]
    degraded: Int32[Array, "*turns"]


class F8Scaling(AbstractLossScaling):
    """A loss scaling that carries a recipe's state as well. Made by `Recipe.init`.

    Pass it wherever a loss scaling goes: to a gradient transform, which returns the next one. A
    step whose gradients are not finite leaves the state of all products as it was.

    Attributes:
        loss: The loss scaling.
        sites: The state of each product, by its name.
        key: Bits of a random key, for recipes that round at random.
        step: The number of steps that have been taken.
        recipe: The recipe.
        off: Products that are computed in the compute dtype, since too much of them was lost.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def loss(params, x):
            return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)


        params = {"up": jnp.ones((32, 64)) / 32, "down": jnp.ones((64, 32)) / 64}
        x = jax.random.normal(jax.random.key(0), (16, 32))
        scaling = halfstep.RECIPES["f8-delayed"].init(loss, params, x)
        assert list(scaling.sites) == ["dot_general.0", "dot_general.1"]
        gradient = halfstep.filter_grad(loss, scaling, policy="f8-delayed")
        scaling, finite, grads = gradient(params, x)
        assert finite
        ```
    """

    loss: AbstractLossScaling
    sites: dict[str, SiteState]
    key: UInt32[Array, " words"] | None
    step: Int32[Array, ""]
    recipe: Recipe = eqx.field(static=True)
    off: tuple[str, ...] = eqx.field(static=True)

    def __init__(
        self,
        *,
        loss: AbstractLossScaling,
        sites: dict[str, SiteState],
        key: Any,
        step: Any,
        recipe: Recipe,
        off: tuple[str, ...] = (),
    ):
        self.loss, self.sites, self.key, self.step = loss, sites, key, step
        self.recipe, self.off = recipe, off

    @staticmethod
    @checked
    def init(
        recipe: Recipe,
        func: Callable[..., Any],
        *args: Any,
        loss_scaling: AbstractLossScaling | None = None,
        key: Any = None,
        policy: Policy | str | None = None,
        params: int | str | Sequence[int | str] = 0,
        calibrate: bool = True,
        **kwargs: Any,
    ) -> "F8Scaling":
        """Make the state of a recipe for a function, as `Recipe.init` does.

        Args:
            recipe: The recipe.
            func: The loss function, or any other function.
            *args: The arguments of the function.
            loss_scaling: A loss scaling to combine with the state.
            key: A random key, for recipes that round at random.
            policy: The policy, if it has rules.
            params: Which arguments hold parameters.
            calibrate: Whether delayed scales begin with the magnitudes of one step.
            **kwargs: Other arguments of the function.

        Raises:
            ValueError: If the recipe rounds at random and no key is given.
            TypeError: If calibration is given a `jax.ShapeDtypeStruct` in place of an array.
        """
        loss = NoLossScaling() if loss_scaling is None else loss_scaling
        policy = as_policy(policy or "bf16").replace(recipe=recipe)
        found = [one for one in recipes_of(recipe, policy.rules) if one.is_random]
        if found and key is None:
            raise ValueError(
                f"the recipe {found[0].name!r} rounds at random: pass key=jax.random.key(seed)."
            )
        settings = settings_of(policy)
        call = trace(func, settings, args, kwargs, params=listed(params), keep=())
        sites = {
            product.name: SiteState(
                history=jnp.zeros((*product.turns, recipe.history, 3), jnp.float32),
                seen=jnp.zeros((*product.turns, 3, 3), jnp.float32),
                degraded=jnp.zeros(product.turns, jnp.int32),
            )
            for product in named_sites(call.plan)
        }
        bits = without_key_type(key) if found else None
        scaling = F8Scaling(
            loss=loss, sites=sites, key=bits, step=jnp.zeros((), jnp.int32), recipe=recipe, off=()
        )
        if not (recipe.history and calibrate and sites):
            return scaling
        shapes = [leaf for leaf in call.arrays if isinstance(leaf, jax.ShapeDtypeStruct)]
        if shapes:
            raise TypeError(
                "the first scales are made of what is seen in one step, which needs arrays; got "
                f"jax.ShapeDtypeStruct for {type_of(shapes[0])}. Pass arrays, or calibrate=False "
                "to begin with scales of 1."
            )
        return _calibrated(scaling, func, settings, listed(params), args, kwargs)

    @property
    def loss_scaling(self) -> Any:
        """The loss scale."""
        return self.loss.loss_scaling

    @property
    def checks_finite(self) -> bool:
        """Always true: what was seen in a bad step must not be kept."""
        return True

    def scale(self, tree: T) -> T:
        """Multiply the inexact leaves by the loss scale, in float32 or wider."""
        return self.loss.scale(tree)

    def unscale(self, tree: T) -> T:
        """Divide the inexact leaves by the loss scale, in float32 or wider."""
        return self.loss.unscale(tree)

    def adjust(self, grads_finite: Any) -> "F8Scaling":
        """Return the scaling for the next step. `observe` records what was seen of products."""
        return dataclasses.replace(self, loss=self.loss.adjust(grads_finite))

    # Methods for gradient transforms.

    def probes(self) -> dict[str, Array]:
        """Return zeros whose gradients are what was seen of each product."""
        return {name: jnp.zeros_like(site.seen) for name, site in self.sites.items()}

    @checked
    def slots(self, probes: Mapping[str, Array]) -> dict[str, Any]:
        """Return the scales, the key and the probe that each product gets."""
        made: dict[str, Any] = {}
        # By sorted names: JAX sorts a dictionary wherever it rebuilds one, and a product must get
        # the same random number before and after.
        for number, name in enumerate(sorted(self.sites)):
            site = self.sites[name]
            if name in self.off:
                made[name] = OFF
                continue
            made[name] = Slot(self._scales(site), self._keys(site, number), probes[name])
        return made

    def _scales(self, site: SiteState) -> Array | None:
        if not self.recipe.history:
            return None
        first, second = self.recipe.forward
        legs = (self.recipe.input_gradient, self.recipe.weight_gradient)
        # One scale serves the gradient in both products of the backward pass: it must fit both.
        most = [leg[place].max for leg, place in zip(legs, (0, 1), strict=True) if leg is not None]
        limits = (first.max, second.max, min(most, default=1.0))
        seen = jnp.max(site.history, axis=-2)
        amax = seen * _like(self._units(), seen) * 2.0**self.recipe.margin
        return jnp.stack([power_of_two(amax[..., i], limits[i]) for i in range(3)], axis=-1)

    def _units(self) -> Array:
        """Return the units of magnitudes: gradients are multiplied by the loss scale."""
        return jnp.stack([jnp.ones(()), jnp.ones(()), jnp.asarray(self.loss_scaling)])

    def _keys(self, site: SiteState, number: int) -> Array | None:
        if self.key is None:
            return None
        key = jax.random.wrap_key_data(self.key)
        key = jax.random.fold_in(jax.random.fold_in(key, self.step), number)
        turns = site.degraded.shape
        if not turns:
            return jax.random.key_data(key)
        return jax.random.key_data(jax.random.split(key, turns))

    @checked
    def observe(self, seen: Mapping[str, Array], finite: Any) -> "F8Scaling":
        """Record what was seen in a step.

        Args:
            seen: The gradients of `probes`.
            finite: The step's verdict: if it is bad, nothing is recorded.
        """
        if missing := [name for name in self.sites if name not in seen]:
            raise ValueError(
                "`seen` must have the gradients of all `probes`; missing are "
                f"{', '.join(missing[:4])}. Give what the gradient transform returns for them."
            )
        predicate = as_predicate(finite)
        good = jnp.asarray(True) if predicate is None else jnp.asarray(predicate)
        sites = {
            name: site if name in self.off else self._recorded(site, seen[name], good)
            for name, site in self.sites.items()
        }
        return dataclasses.replace(self, sites=sites, step=self.step + 1)

    def _recorded(self, site: SiteState, seen: Array, good: Array) -> SiteState:
        # Divided by the loss scale, so that magnitudes of steps with different scales can be
        # compared. The scale is a power of two, so nothing is rounded.
        amax = seen[..., 0] / _like(self._units(), seen[..., 0])
        history = site.history
        if self.recipe.history:
            pushed = jnp.concatenate([amax[..., None, :], history[..., :-1, :]], axis=-2)
            # A magnitude of zero says that nothing was seen: a branch was not taken.
            valid = good & (amax > 0) & jnp.isfinite(amax)
            history = jnp.where(valid[..., None, :], pushed, history)
        most = jnp.asarray([self.recipe.saturated, self.recipe.flushed])
        worse = jnp.any(seen[..., 1:] > _like(most, seen[..., 1:]), axis=(-1, -2))
        degraded = jnp.where(worse, site.degraded + 1, 0)
        return SiteState(
            history=history,
            seen=jnp.where(good, seen.at[..., 0].set(amax), site.seen),
            degraded=jnp.where(good, degraded, site.degraded),
        )

    # Methods that the user calls between steps.

    def review(self) -> "F8Scaling":
        """Take products that lose too much out of the recipe, on the host.

        Products that exceeded the recipe's `saturated` or `flushed` for `patience` steps in a row
        are computed in the compute dtype from now on. `review` reads the counters, so it waits for
        the step: call it only when you log. A step function is recompiled if something has changed.
        """
        if not self.recipe.patience:
            return self
        bad = tuple(
            name
            for name, site in self.sites.items()
            if name not in self.off
            and int(np.max(np.asarray(site.degraded), initial=0)) >= self.recipe.patience
        )
        return dataclasses.replace(self, off=(*self.off, *bad)) if bad else self


def _like(vector: Array, array: Array) -> Array:
    """Give a vector for an array's last axis the array's rank: ranks are not promoted silently."""
    return vector.reshape((1,) * (array.ndim - 1) + vector.shape)


def _calibrated(
    scaling: F8Scaling,
    func: Callable[..., object],
    settings: Settings,
    params: tuple[int | str, ...],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> F8Scaling:
    """Fill the history with the magnitudes of one step, which uses current scaling."""

    @eqx.filter_jit
    def seen(args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Array]:
        def value(probes: Mapping[str, Array]) -> Array:
            slots = {name: Slot(None, None, probe) for name, probe in probes.items()}
            run = rewritten(func, settings, params=params, every_rule=False, state=slots)
            first = jtu.tree_leaves(run(*args, **kwargs))[0]
            return jnp.sum(first.astype(at_least_float32(first.dtype)))

        return jax.grad(value)(scaling.probes())

    found = seen(args, kwargs)
    sites = {}
    for name, site in scaling.sites.items():
        amax = found[name][..., None, :, 0]
        finite = jnp.where(jnp.isfinite(amax), amax, 0)
        history = jnp.broadcast_to(finite, site.history.shape)
        # Each history has its own buffer: JAX refuses to donate one buffer twice.
        sites[name] = dataclasses.replace(site, history=jnp.array(history), seen=found[name])
    return dataclasses.replace(scaling, sites=sites)


state_of.register(Recipe, F8Scaling.init)
