"""Define recipes for matrix products in 8 and 4 bits: the format and the scales of each leg."""

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from halfstep._base import check_fields

Element = Literal["e4m3", "e5m2", "e2m1"]
Per = Literal["tensor", "row", "block", "tile"]
Rounding = Literal["nearest", "stochastic"]
RecipeName = Literal[
    "f8", "f8-e4m3", "f8-delayed", "f8-row", "f8-row-gw", "f8-block", "mxfp8", "nvfp4"
]
"""The names of `RECIPES`."""

_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "e4m3": np.dtype(jnp.float8_e4m3fn),
        "e5m2": np.dtype(jnp.float8_e5m2),
        "e2m1": np.dtype(jnp.float4_e2m1fn),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
    """How one factor of a product is quantized to 8 or 4 bits.

    Attributes:
        element: The format of the elements: `"e4m3"` and `"e5m2"` have 8 bits, `"e2m1"` has 4.
        per: Which elements share a scale: the whole `"tensor"`; a `"row"`, which is all that is
            summed for one element of the result; a `"block"` of `size` elements of a row; or a
            `"tile"`, which is the same block of `size` rows.
        size: The number of elements of a block along the dimension that is summed.
        two_level: Whether the scales of blocks are 8-bit numbers (e4m3), with another scale for the
            whole tensor. Otherwise they are powers of two, which never round.
        rounding: `"nearest"`, or `"stochastic"`: at random, with the right mean.
        four_or_six: Whether the largest magnitude of a block of `"e2m1"` becomes 4 or 6, whichever
            loses less of the block. Elements between 4 and 6 are a third apart, so that many blocks
            lose less without them.
        rotate: Whether blocks are first multiplied by a Hadamard matrix with random signs, which
            spreads outliers. The other factor of the product is rotated in the same way, so the
            product does not change.

    Example:
        ```python
        import halfstep

        block = halfstep.Factor(element="e4m3", per="block", size=32)
        assert block == halfstep.RECIPES["mxfp8"].forward[0]
        assert block.max == 448
        ```
    """

    element: Element
    per: Per = "tensor"
    size: int = 0
    two_level: bool = False
    rounding: Rounding = "nearest"
    rotate: bool = False
    four_or_six: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check(self, "element", get_args(Element))
        _check(self, "per", get_args(Per))
        _check(self, "rounding", get_args(Rounding))
        if self.is_blocked != bool(self.size):
            raise ValueError(
                f"per={self.per!r} takes {'a' if self.is_blocked else 'no'} size; "
                f"got size={self.size}."
            )
        if self.size and (self.size < 2 or self.size & (self.size - 1)):
            raise ValueError(f"`size` is a power of two; got {self.size}.")
        if self.element == "e2m1" and not self.is_blocked:
            raise ValueError(
                f"4 bits need a scale for each block; got per={self.per!r}. Give per='block' and a "
                "size."
            )
        if self.four_or_six and not (self.element == "e2m1" and self.two_level):
            raise ValueError(
                "`four_or_six` is about elements of 4 bits with scales of two levels; got "
                f"element={self.element!r} and two_level={self.two_level}. Give element='e2m1' and "
                "two_level=True."
            )
        if (self.two_level or self.rotate) and not self.is_blocked:
            raise ValueError(
                f"`two_level` and `rotate` are about blocks; got per={self.per!r}. Give "
                "per='block'."
            )

    @property
    def is_blocked(self) -> bool:
        """Whether a row has several scales, which cannot be factored out of its sum."""
        return self.per in ("block", "tile")

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return _DTYPES[self.element]

    @property
    def max(self) -> float:
        """The largest number that an element can be."""
        return float(jnp.finfo(self.dtype).max)


def _check(owner: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in allowed:
        raise ValueError(f"`{name}` is one of {', '.join(map(repr, allowed))}; got {value!r}.")


Leg = tuple[Factor, Factor]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How products of activations and weights are computed in 8 or 4 bits.

    A product has three legs: the forward product, the gradient of its input, and the gradient of
    its weight. Each leg has two factors, and quantizes both of them from their original values.

    Attributes:
        name: The name of the recipe.
        forward: How the activation and the weight are quantized.
        input_gradient: How the gradient and the weight are quantized; `None` for a product in the
            policy's compute dtype.
        weight_gradient: How the activation and the gradient are quantized, or `None`.
        history: The number of past steps whose largest magnitudes set the scales (delayed scaling).
            With 0, the values themselves set their scales (current scaling).
        margin: Delayed scales leave room for `2**margin` times the largest magnitude seen.
        activations: Whether products of two activations, such as attention scores, are quantized.
        multiple_of: The size that is summed, and each side of a weight, must be a multiple of this.
        saturated: The share of a factor that may exceed the largest element.
        flushed: The share of a factor that may become zero.
        patience: After this many steps in a row above one of these shares, `F8Scaling.review` takes
            a product out of the recipe; 0 for never.
        experimental: Whether the recipe may still change.

    Example:
        ```python
        import dataclasses
        import halfstep

        recipe = halfstep.RECIPES["f8"]
        assert recipe.forward[0].element == "e4m3"
        assert recipe.weight_gradient[1].element == "e5m2"
        mine = dataclasses.replace(recipe, name="mine", activations=True)
        policy = halfstep.Policy(compute="bf16", recipe=mine)
        ```
    """

    name: str
    forward: Leg
    input_gradient: Leg | None
    weight_gradient: Leg | None
    history: int = 0
    margin: int = 0
    activations: bool = False
    multiple_of: int = 16
    saturated: float = 0.01
    flushed: float = 0.5
    patience: int = 32
    experimental: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for leg in self.legs:
            first, second = leg
            # A scale per block can be factored out of a sum only where both factors change their
            # scales at the same places. A rotation cancels out only if both factors are rotated in
            # the same way.
            if (first.size, first.rotate) != (second.size, second.rotate):
                if first.rotate or second.rotate:
                    raise ValueError(
                        "both factors of a leg are rotated, in blocks of one size; got "
                        f"rotate={first.rotate}, size={first.size} and rotate={second.rotate}, "
                        f"size={second.size}. Set both alike."
                    )
                if 0 not in (first.size, second.size):
                    raise ValueError(
                        "both factors of a leg have blocks of one size along what is summed; got "
                        f"{first.size} and {second.size}."
                    )
        if self.history < 0 or self.margin < 0:
            raise ValueError(
                f"`history` and `margin` must be 0 or more; got {self.history} and {self.margin}."
            )
        if self.history and any(f.per != "tensor" for leg in self.legs for f in leg):
            raise ValueError(
                f"delayed scaling (`history`) is for scales per tensor; got history={self.history} "
                f"and per={[f.per for leg in self.legs for f in leg]}. Leave it out, or give every "
                "factor per='tensor'."
            )

    @property
    def legs(self) -> tuple[Leg, ...]:
        """The legs that are quantized."""
        legs = (self.forward, self.input_gradient, self.weight_gradient)
        return tuple(leg for leg in legs if leg is not None)

    @property
    def is_random(self) -> bool:
        """Whether the recipe rounds or rotates anything at random."""
        factors = [factor for leg in self.legs for factor in leg]
        return any(factor.rounding == "stochastic" or factor.rotate for factor in factors)

    @property
    def needs_state(self) -> bool:
        """Whether the recipe needs state: past magnitudes, or a source of randomness."""
        return bool(self.history) or self.is_random

    def init(self, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make the state of this recipe for a function: past magnitudes and a random key.

        Recipes that need no state can have one, too: it records what they see of each product.

        Args:
            func: The loss function, or any other function.
            *args: The arguments of the function. Delayed scales begin with the magnitudes of one
                step with these arguments.
            **options: `loss_scaling=`, a loss scaling to combine with the state; `key=`, for
                recipes that round at random; `params=0`, which arguments hold parameters;
                `policy=`, if it has rules; `calibrate=True`, whether the step for delayed scales is
                taken. All others are arguments of the function.

        Returns:
            `F8Scaling.init(recipe, func, *args, **options)`: an `F8Scaling`, which is passed in
            place of a loss scaling.
        """
        # Whoever has only unpickled a recipe has imported nothing that makes its state. The import
        # is by name, because no import goes upwards: `state_of` says how layers are kept apart.
        importlib.import_module("halfstep._training")
        return state_of(self, func, *args, **options)


# `halfstep._training` registers its class here when it is imported.
@functools.singledispatch
def state_of(recipe: object, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Make the state of a recipe for a function; see `Recipe.init`.

    A recipe belongs to a policy, and its state belongs to training, which is a layer above. The
    class of the state registers here how to make it from a recipe, since no import goes upwards.
    """
    raise TypeError(f"a recipe is required; got {recipe!r}. Take one of halfstep.RECIPES.")


def _recipes() -> Mapping[str, Recipe]:
    e4, e5 = Factor(element="e4m3"), Factor(element="e5m2")
    row = Factor(element="e4m3", per="row")
    block = Factor(element="e4m3", per="block", size=128)
    tile = Factor(element="e4m3", per="tile", size=128)
    mx = Factor(element="e4m3", per="block", size=32)
    fp4 = Factor(element="e2m1", per="block", size=16, two_level=True)
    fp4_random = dataclasses.replace(fp4, rounding="stochastic")
    fp4 = dataclasses.replace(fp4, four_or_six=True)
    fp4_tile = dataclasses.replace(fp4, per="tile")
    rotated, rotated_random = (dataclasses.replace(f, rotate=True) for f in (fp4, fp4_random))
    # Gradients need range more than digits, so they use e5m2, as in NVIDIA's Transformer Engine,
    # which calls this "hybrid". A scale for each row or block already provides the range, and
    # everything is e4m3 there. A weight's blocks are square (tiles), so that its transpose, by
    # which the gradient of the input multiplies, has the same scales and the same numbers.
    rows = (
        Recipe(name="f8", forward=(e4, e4), input_gradient=(e5, e4), weight_gradient=(e4, e5)),
        Recipe(name="f8-e4m3", forward=(e4, e4), input_gradient=(e4, e4), weight_gradient=(e4, e4)),
        Recipe(
            name="f8-delayed",
            forward=(e4, e4),
            input_gradient=(e5, e4),
            weight_gradient=(e4, e5),
            history=16,
        ),
        Recipe(
            name="f8-row", forward=(row, row), input_gradient=(row, row), weight_gradient=(row, row)
        ),
        # torchao's `rowwise_with_gw_hp`: the weight's gradient, which optimizers see, in 16 bits.
        Recipe(
            name="f8-row-gw", forward=(row, row), input_gradient=(row, row), weight_gradient=None
        ),
        # The recipe of DeepSeek-V3.
        Recipe(
            name="f8-block",
            forward=(block, tile),
            input_gradient=(block, tile),
            weight_gradient=(block, block),
        ),
        # The OCP's microscaling (MX) formats: 32 elements share a power of two.
        Recipe(name="mxfp8", forward=(mx, mx), input_gradient=(mx, mx), weight_gradient=(mx, mx)),
        # NVIDIA's recipe for training (arXiv:2509.25149). With 4 bits, rounding to nearest would
        # bias gradients, so they are rounded at random. Outliers matter most for the weight's
        # gradient, which sums over tokens, so only its factors are rotated. Blocks that are rounded
        # to nearest are scaled to 4 or to 6, whichever loses less (arXiv:2512.02010). Blocks of
        # 1 x 16 lose less of a weight than tiles, but trained worse: a gradient by a weight that
        # is rounded otherwise than in the forward pass is not that of the rounded function.
        Recipe(
            name="nvfp4",
            forward=(fp4, fp4_tile),
            input_gradient=(fp4_random, fp4_tile),
            weight_gradient=(rotated, rotated_random),
            experimental=True,
        ),
    )
    return MappingProxyType({row.name: row for row in rows})


RECIPES: Mapping[str, Recipe] = _recipes()
"""The recipes that a policy can name.

| name | forward | gradients | scales |
|---|---|---|---|
| `"f8"` | e4m3 | e5m2 | per tensor, powers of two |
| `"f8-e4m3"` | e4m3 | e4m3 | the same |
| `"f8-delayed"` | e4m3 | e5m2 | the same, from the last 16 steps |
| `"f8-row"` | e4m3 | e4m3 | per row |
| `"f8-row-gw"` | e4m3 | e4m3; for weights in the compute dtype | per row |
| `"f8-block"` | e4m3 | e4m3 | per 1 x 128 block, for weights per 128 x 128 |
| `"mxfp8"` | e4m3 | e4m3 | per 1 x 32 block |
| `"nvfp4"` | e2m1 | e2m1, rounded at random, rotated | per 1 x 16 block in 8 bits, and per tensor |
"""


def as_recipe(recipe: object) -> Recipe | None:
    """Return the recipe of a name, or the recipe itself."""
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and recipe in RECIPES:
        return RECIPES[recipe]
    near = difflib.get_close_matches(str(recipe), RECIPES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"a recipe is a Recipe or one of {', '.join(map(repr, RECIPES))}; got {recipe!r}.{hint}"
    )
