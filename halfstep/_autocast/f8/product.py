"""Compute one product in 8 or 4 bits: three legs, each quantized as a recipe says."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.sharding import NamedSharding

from halfstep._autocast.f8 import blocks
from halfstep._autocast.f8.dimensions import (
    Roles,
    as_laid_out,
    beside,
    divided,
    dot,
    of_dot,
    of_result,
)
from halfstep._autocast.f8.encode import Written, observed, read, same_on_both, written
from halfstep._autocast.f8.experts import Groups, padded, roles_of
from halfstep._autocast.f8.linear import explicit_sharding, gradient_by, linear, product_with
from halfstep._policy import Factor, Recipe
from halfstep.quant._scaled import Blocks, Scaled

ELEMENTS = "halfstep_f8"
"""The scope of a product that multiplies elements of 8 or 4 bits."""
ROUNDED = "halfstep_rounded"
"""The scope of a product that multiplies, in 16 bits, values rounded to 8 or 4 bits."""


def _marked(*, direct: bool, quantized: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Return a scope for one product; none for a leg that the recipe does not quantize."""
    if not quantized:
        return contextlib.nullcontext()
    return jax.named_scope(ELEMENTS if direct else ROUNDED)


class Slot(NamedTuple):
    """The part of a recipe's state that one product gets.

    Attributes:
        scales: The numbers that the activation, the weight and the gradient are multiplied by,
            `[3]`; `None` if they are scaled by their current values.
        key: Bits of a random key; `None` if nothing is random.
        probe: Zeros, `[3, 3]`. Their gradient is what was observed of the activation, the weight
            and the gradient: the largest magnitude, and the fractions that were saturated and
            flushed to zero.
    """

    scales: jax.Array | None
    key: jax.Array | None
    probe: jax.Array


_Fixed = tuple[jax.Array | None, jax.Array | None]
"""The scales and the key of a slot, which have no gradient."""

Slots = Mapping[int, Any]
"""The slot of each operation, by its number, or the slots of the products inside it."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Off:
    """Stands in place of a slot: the product is computed in the compute dtype."""


OFF = Off()


@dataclasses.dataclass(frozen=True)
class RecipeProduct:
    """A product that is computed in 8 or 4 bits, and all that is known before it runs."""

    contraction: Primitive
    options: tuple[tuple[str, Any], ...]
    """The parameters of the primitive."""
    recipe: Recipe
    weight: int
    """Which of its factors is the weight."""
    compute: np.dtype
    out: np.dtype
    """The dtype of the result."""
    gradients: tuple[np.dtype, np.dtype]
    """The dtype of each factor's gradient."""
    # A dimension is a number, or a symbol of `jax.export`.
    shapes: tuple[tuple[Any, ...], tuple[Any, ...]]
    out_shape: tuple[Any, ...]

    def __call__(self, operands: Sequence[Any], slot: Slot | None) -> jax.Array:
        """Multiply.

        Args:
            operands: The two factors, and the contraction's other operands.
            slot: The product's slot in the recipe's state, if there is state.
        """
        if slot is None and self.recipe.is_random:
            # `check_state` asks for the state first.
            raise ValueError(
                f"the recipe {self.recipe.name!r} is random and needs a key: pass its state, "
                "scaling=recipe.init(...)."
            )
        # Observations of the backward pass can leave `jax.grad` only as a gradient: that of the
        # probe. So the probe is an argument, next to the arguments that have no gradient.
        probe = None if slot is None else slot.probe
        # The state's scales are those of delayed scaling, which a rule's recipe may not have.
        scales = slot.scales if slot is not None and self.recipe.history else None
        fixed = None if slot is None else (scales, slot.key)

        @jax.custom_jvp
        def func(
            left: jax.Array,
            right: jax.Array,
            probe: jax.Array | None,
            rest: tuple[Any, ...],
            fixed: _Fixed | None,
        ) -> jax.Array:
            return self.forward([left, right, *rest], _slot(fixed, probe))[0]

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            left, right, probe, rest, fixed = primals
            slot = _slot(fixed, probe)
            made, kept, seen = self.forward([left, right, *rest], slot)
            moving = tuple(
                place
                for place in range(3)
                if tangents[place] is not None and not isinstance(tangents[place], SymbolicZero)
            )
            if not moving:
                return made, jnp.zeros_like(made)
            # Each factor, as the gradient of the other one needs it.
            needed = tuple(kept[place] if 1 - place in moving else None for place in (0, 1))
            residuals = _Residuals(needed, rest, slot, seen)
            linears = [tangents[place] for place in moving]
            return made, linear(_Derivative(self, moving), residuals, linears)

        func.defjvp(rule, symbolic_zeros=True)
        return func(operands[0], operands[1], probe, tuple(operands[2:]), fixed)

    @property
    def _is_dot(self) -> bool:
        return self.contraction is jax.lax.dot_general_p

    @property
    def units(self) -> tuple[str, ...]:
        """The GPUs that multiply its blocks with their scales; empty if there are none."""
        is_known = self._is_dot or self._roles_of_groups is not None
        return blocks.generations(*self.recipe.forward) if is_known else ()

    @property
    def padding(self) -> float | None:
        """How many rows of experts one GPU multiplies for each row; `None` if not in tiles."""
        if self._is_dot or not self.units:
            return None
        (of_rows, of_matrices), (shape, matrices) = self.roles, self.shapes
        rows = shape[of_rows.own[0]]
        if not isinstance(rows, int) or not rows:
            return None
        order = (*of_matrices.shared, *of_matrices.summed, *of_matrices.own)
        groups, width, other = (matrices[axis] for axis in order)
        return padded(rows, groups, width, other) / rows

    @functools.cached_property
    def _roles_of_groups(self) -> tuple[Roles, Roles] | None:
        """The roles of a product of the rows of each group and the group's own matrix."""
        return roles_of(self.contraction.name, dict(self.options), self.shapes)

    @functools.cached_property
    def roles(self) -> tuple[Roles, Roles]:
        """The roles of both factors' dimensions on the forward leg."""
        if self._is_dot:
            dims = dict(self.options)["dimension_numbers"]
            return of_dot(dims, [len(shape) for shape in self.shapes])
        # The roles of a convolution, which has one scale for each tensor, play no part.
        return self._roles_of_groups or (Roles((), (1,), (0,)), Roles((0,), (1,), (2,)))

    # Forward.

    def forward(
        self, operands: Sequence[Any], slot: Slot | None
    ) -> tuple[Any, tuple[Any, Any], Any]:
        """Return the result, both factors as the other legs take them, and what was observed."""
        stored: list[Any] = []
        kept: list[Any] = []
        seen: list[Any] = []
        groups = self.groups(operands[0], operands[2:])
        for place in (0, 1):
            value, roles = operands[place], self.roles[place]
            which = int(place == self.weight)
            factor, later = self.recipe.forward[which], self.later(place)
            make = functools.partial(written, scale=_scale(slot, which), compute=self.compute)
            of_rows = groups if place == 0 else None
            if of_rows is not None:
                value = of_rows.used(value, factor, axis=roles.own[0])
            first = make(value, factor, roles, key=_key(slot, which), rotation=_key(slot, 8))
            stored.append(first)
            # Both legs share one array if the second one would be equal: a transposed copy with
            # scales of its own costs as much memory as the first.
            if same_on_both(factor, later):
                kept.append(first)
            else:
                kept.append(
                    make(
                        value
                        if of_rows is None
                        else of_rows.spread(value, self.recipe.weight_gradient, axis=roles.own[0]),
                        later,
                        roles.turned(),
                        key=_key(slot, 2 + which),
                        rotation=_key(slot, 6 + which),
                    )
                )
            if slot is not None:
                seen.append(observed(value, first, factor, roles))
        made = self._product(stored, operands[2:], groups, self._sharding(operands))
        if slot is not None:
            # The activation comes first, then the weight.
            seen = [seen[1 - self.weight], seen[self.weight]]
        return made, (kept[0], kept[1]), seen

    def _sharding(self, operands: Sequence[Any]) -> NamedSharding | None:
        """Return how the result is divided, over explicit axes of a mesh."""
        if not (self._is_dot and any(explicit_sharding(jax.typeof(v)) for v in operands)):
            return None
        options = dict(self.options)
        made = jax.eval_shape(lambda *values: self.contraction.bind(*values, **options), *operands)
        return explicit_sharding(made)

    def groups(self, value: Any, rest: Sequence[Any]) -> Groups | None:
        """Return the groups of rows that are multiplied by a matrix each, if there are any.

        Over explicit axes of a mesh there are none: the shardings of all steps would be asked for.

        Args:
            value: A factor, or a tangent or cotangent.
            rest: The contraction's other operands.
        """
        found = self._roles_of_groups
        if found is None or len(rest) != 1 or explicit_sharding(jax.typeof(value)):
            return None
        rows = self.shapes[0][found[0].own[0]]
        # A size may be a symbol of `jax.export`.
        return Groups(jnp.asarray(rest[0]), rows) if isinstance(rows, int) and rows else None

    def later(self, place: int) -> Factor | None:
        """Return how a factor is encoded for the leg that computes the other one's gradient."""
        leg = self.recipe.input_gradient if place == self.weight else self.recipe.weight_gradient
        if leg is None:
            return None
        return leg[1] if place == self.weight else leg[0]

    def _product(
        self,
        factors: Sequence[Any],
        rest: Sequence[Any],
        groups: Groups | None,
        sharding: NamedSharding | None,
    ) -> Any:
        forward = self.recipe.forward
        ways = [forward[int(place == self.weight)] for place in (0, 1)]
        made = self._of_blocks(factors, ways, groups, self.out_shape, self.out, sharding)
        if made is not None:
            return made
        direct = self._is_direct(factors)
        given = [
            self._entering(
                factors[place],
                ways[place],
                self.roles[place],
                self.shapes[place],
                direct=direct,
            )
            for place in (0, 1)
        ]
        options = {**dict(self.options), "preferred_element_type": _accumulator(self.out)}
        with _marked(direct=direct):
            made = self.contraction.bind(*given, *rest, **options)
        return (self._scaled(made, factors, self.roles) if direct else made).astype(self.out)

    def _entering(
        self,
        array: Written,
        factor: Factor | None,
        roles: Roles,
        shape: Sequence[Any],
        *,
        direct: bool,
    ) -> jax.Array:
        """Return a factor as it enters a product: its elements, or what they stand for."""
        if direct and isinstance(array, Scaled):
            return array.elements
        return read(array, factor, roles, shape, self.compute)

    def _of_blocks(
        self,
        factors: Sequence[Any],
        ways: Sequence[Factor | None],
        groups: Groups | None,
        shape: Sequence[Any],
        out: np.dtype,
        sharding: NamedSharding | None,
        *,
        over_rows: bool = False,
    ) -> jax.Array | None:
        """Return the product of two factors in blocks, if some hardware has units for it.

        Args:
            factors: The factors, encoded.
            ways: How they are encoded.
            groups: The groups of rows, of a product of experts.
            shape: The result's shape: shared dimensions, the first factor's own, the second's own.
            out: The dtype of the result.
            sharding: How the result is divided, over explicit axes of a mesh.
            over_rows: Whether a product of experts sums over rows.
        """
        first, second = factors
        of_first, of_second = ways
        if not (isinstance(first, Blocks) and isinstance(second, Blocks)):
            return None
        if of_first is None or of_second is None or not blocks.has_units(of_first, of_second):
            return None
        if not self._is_dot:
            if groups is None:
                return None
            form = blocks.Form(self.compute, _accumulator(out), ELEMENTS, ROUNDED)
            made = groups.multiply(
                first, second, of_first, of_second, over_rows=over_rows, form=form
            )
            return made.astype(out)

        def multiply(first: Blocks, second: Blocks) -> jax.Array:
            made = blocks.multiply(
                first,
                second,
                of_first,
                of_second,
                compute=self.compute,
                out=_accumulator(out),
                scopes=(ELEMENTS, ROUNDED),
            )
            return made.reshape(tuple(shape)).astype(out)

        if sharding is not None:
            # Over explicit axes of a mesh the result's sharding has to be said. How the product
            # itself is divided is left to the compiler, as over other axes.
            over_auto: Any = jax.sharding.auto_axes(multiply, out_sharding=sharding)
            return over_auto(first, second)
        return multiply(first, second)

    def _is_direct(self, factors: Sequence[Any]) -> bool:
        """Return whether the elements can be multiplied, and the result be scaled."""
        if not all(isinstance(factor, Scaled) for factor in factors):
            return False
        return self._is_dot or all(factor.scale.size == 1 for factor in factors)

    def _scaled(self, made: jax.Array, factors: Sequence[Any], roles: Sequence[Roles]) -> jax.Array:
        """Multiply a product of elements by the scales of both factors."""
        scales = [factor.scale for factor in factors]
        if all(scale.size == 1 for scale in scales):
            scale = scales[0].reshape(()) * scales[1].reshape(())
            return made * scale.astype(made.dtype)
        of_left = beside(scales[0], roles[0], 0, len(roles[1].own))
        of_right = beside(scales[1], roles[1], len(roles[0].own), 0)
        return made * of_left.astype(made.dtype) * of_right.astype(made.dtype)

    # Backward.

    def gradient(
        self,
        place: int,
        other: Written,
        cotangent: jax.Array,
        rest: Sequence[Any],
        slot: Slot | None,
        like: jax.ShapeDtypeStruct,
    ) -> tuple[Any, Any]:
        """Return the gradient of one factor, and what was observed of the cotangent.

        Args:
            place: Which factor.
            other: The other factor, as it was encoded for this leg.
            cotangent: The cotangent of the result.
            rest: The contraction's other operands.
            slot: The product's slot in the recipe's state, if there is state.
            like: The factor's shape, dtype and sharding.
        """
        is_weight = place == self.weight
        leg = self.recipe.weight_gradient if is_weight else self.recipe.input_gradient
        factor = None if leg is None else leg[1 if is_weight else 0]
        roles = self._cotangent_roles(1 - place)
        groups, before = self.groups(cotangent, rest), cotangent.size
        if groups is not None and is_weight:
            cotangent = groups.spread(cotangent, leg)
        elif groups is not None:
            cotangent = groups.used(cotangent, factor)
        arrived = written(
            cotangent,
            factor,
            roles,
            scale=_scale(slot, 2),
            key=_key(slot, 4 + is_weight),
            rotation=_key(slot, 6 if is_weight else 7),
            compute=self.compute,
        )
        seen = None if slot is None else observed(cotangent, arrived, factor, roles)
        if seen is not None and cotangent.size != before:
            # Zeros between groups do not count.
            seen = seen * jnp.asarray([1, *[cotangent.size / before] * 2], seen.dtype)
        dtype = _accumulator(self.gradients[place])
        turned = self.roles[1 - place].turned()
        own = self.roles[place]
        axes = (*own.shared, *own.own, *own.summed)
        made = self._of_blocks(
            [arrived, other],
            [factor, self.later(1 - place)],
            groups,
            [self.shapes[place][axis] for axis in axes],
            self.gradients[place],
            divided(like, axes),
            over_rows=is_weight,
        )
        if made is not None:
            # A transpose that becomes part of a product of decoded factors gives it its name.
            with _marked(direct=False):
                return as_laid_out(made, axes), seen
        direct = self._is_direct([arrived, other])
        given = self._entering(arrived, factor, roles, self.out_shape, direct=direct)
        against = self._entering(
            other, self.later(1 - place), turned, self.shapes[1 - place], direct=direct
        )
        # A transpose that becomes part of the product gives the product its name.
        with _marked(direct=direct, quantized=factor is not None):
            if self._is_dot:
                made = dot(given, against, roles, turned, dtype, divided(like, axes))
            else:
                options, wanted = dict(self.options), like.update(dtype=dtype)
                made = gradient_by(self.contraction, options, place, given, against, rest, wanted)
            if direct:
                made = self._scaled(made, [arrived, other], [roles, turned])
            if self._is_dot:
                # The factor's own dimensions came with the cotangent, and its summed dimensions
                # with the other factor, in the order in which they are paired.
                made = as_laid_out(made, axes)
        return made.astype(self.gradients[place]), seen

    def _cotangent_roles(self, summed: int) -> Roles:
        """Return the cotangent's roles on the leg that sums over one factor's own dimensions."""
        if self._is_dot:
            return of_result(*self.roles, summed)
        return Roles((), (0,), (1,)) if summed == 0 else Roles((), (1,), (0,))


def _accumulator(dtype: np.dtype) -> np.dtype:
    # A product of elements is scaled down only afterwards: float16 could not hold it until then.
    return np.dtype(np.float32) if dtype == np.dtype(np.float16) else dtype


def _scale(slot: Slot | None, which: int) -> jax.Array | None:
    return None if slot is None or slot.scales is None else slot.scales[which]


def _key(slot: Slot | None, which: int) -> jax.Array | None:
    # Numbers of the keys: 0 and 1 round the activation and the weight forward, 2 and 3 the same for
    # the gradient of the other factor, 4 and 5 round the cotangent for the gradients of the
    # activation and the weight, 6 and 7 rotate the legs of the weight's and of the activation's
    # gradient, and 8 the forward leg. Both factors of a leg take the same rotation, which cancels
    # in their product.
    if slot is None or slot.key is None:
        return None
    return jax.random.fold_in(jax.random.wrap_key_data(slot.key), which)


# The derivative.


class _Residuals(NamedTuple):
    """Everything that the derivative takes in addition to the tangents."""

    kept: tuple[Any, ...]
    """Each factor as the other one's gradient takes it; `None` if that gradient is not needed."""
    rest: tuple[Any, ...]
    slot: Slot | None
    seen: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """The derivative of a product, as a linear function of the tangents."""

    site: RecipeProduct
    moving: tuple[int, ...]
    """The operands that have a tangent: 0 and 1 for the factors, and 2 for the probe."""

    def push(self, residuals: _Residuals, linears: Sequence[jax.Array]) -> jax.Array:
        """Return the tangent of the result, in the compute dtype, from the encoded factors."""
        (kept, rest, slot, _), site = residuals, self.site
        options = {**dict(site.options), "preferred_element_type": site.out}
        terms = []
        for place, tangent in zip(self.moving, linears, strict=True):
            if place == 2:
                continue
            roles = site.roles[1 - place].turned()
            rotation = _key(slot, 6 + (1 - place == site.weight))
            groups = site.groups(tangent, rest) if place == site.weight else None
            leg, shape = site.recipe.weight_gradient, site.shapes[1 - place]
            against = read(
                kept[1 - place],
                site.later(1 - place),
                roles,
                shape if groups is None else groups.shape(shape, leg, axis=roles.summed[0]),
                site.compute,
                rotation=rotation,
            )
            if groups is not None:
                against = groups.gathered(against, leg, axis=roles.summed[0])
            given = tangent.astype(site.compute)
            terms.append(product_with(site.contraction, options, place, given, against, rest))
        return functools.reduce(jnp.add, terms) if terms else jnp.zeros(site.out_shape, site.out)

    def pull(
        self, residuals: _Residuals, cotangent: jax.Array, likes: Sequence[jax.ShapeDtypeStruct]
    ) -> Sequence[jax.Array]:
        """Return the gradients of the operands that have a tangent."""
        (kept, rest, slot, seen), site = residuals, self.site
        made: dict[int, Any] = {}
        of_gradient: Any = None
        for place, like in zip(self.moving, likes, strict=True):
            if place != 2:
                made[place], found = site.gradient(
                    place, kept[1 - place], cotangent, rest, slot, like
                )
                # Both legs see the same cotangent, quantized for each. The worse of the two is
                # recorded.
                of_gradient = found if of_gradient is None else jnp.maximum(of_gradient, found)
        if 2 in self.moving:
            nothing = jnp.zeros((3,), jnp.float32)
            made[2] = jnp.stack([*seen, nothing if of_gradient is None else of_gradient])
        return [
            made[place].astype(like.dtype) for place, like in zip(self.moving, likes, strict=True)
        ]


def _slot(fixed: _Fixed | None, probe: jax.Array | None) -> Slot | None:
    return None if fixed is None or probe is None else Slot(fixed[0], fixed[1], probe)
