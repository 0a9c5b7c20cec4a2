"""Count the contractions of a compiled step that are in 8 bits or fewer, and explain the others."""

import dataclasses
import math
from collections.abc import Sequence

from halfstep._autocast import ELEMENTS, ROUNDED
from halfstep._base import flops


@dataclasses.dataclass(frozen=True)
class Product:
    """Contractions of a step that are alike: of the same dtypes and shapes, from the same place.

    Attributes:
        lhs: The left operand as the instruction takes it, such as `bfloat16[4096,1024]`.
        rhs: The right operand.
        out: The result of the instruction.
        flops: FLOPs of all these contractions, per device and step.
        count: How often they run in a step.
        name: JAX's name of the operation, with the scopes that it is in.
        source: The user's line, `train.py:12`; empty if the program does not say.
    """

    lhs: str
    rhs: str
    out: str
    flops: int
    count: int
    name: str
    source: str

    @property
    def in_f8(self) -> bool:
        """Whether both operands have 8 bits or fewer."""
        return all(side.startswith(("float8", "float4")) for side in (self.lhs, self.rhs))

    @property
    def of_recipe(self) -> bool:
        """Whether a recipe made the product, or the user wrote it in 8 bits by hand."""
        return self.in_f8 or ELEMENTS in self.name or ROUNDED in self.name

    @property
    def why_not(self) -> str:
        """Why the product is not in 8 bits, as far as the program says."""
        if self.in_f8:
            return ""
        dtypes = " x ".join(dict.fromkeys(side.partition("[")[0] for side in (self.lhs, self.rhs)))
        # Scopes that the transform opens around a recipe's products survive as parts of the name.
        if ELEMENTS in self.name:
            return f"the compiler multiplies in {dtypes} what the recipe wrote in 8 bits"
        if ROUNDED in self.name:
            return f"the recipe rounds to 8 or 4 bits and multiplies in {dtypes}"
        return "left out by the recipe, or not in its reach: halfstep.explain says why"


@dataclasses.dataclass(frozen=True)
class F8Count:
    """How many contractions of a compiled step are in 8 bits or fewer.

    Attributes:
        count: The number of contractions in 8 bits or fewer, iterations of loops included.
        total: The number of all contractions.
        flops: Their share of the FLOPs of all contractions; 1 if there are none.
        eligible: Their share of the FLOPs of a recipe's products, forward and backward. Without any
            such product, the share is that of all contractions.
        units: Whether the target has fp8 units. Without these units, 8-bit operands are multiplied
            at the rate of 16 bits.
    """

    count: int
    total: int
    flops: float
    eligible: float
    units: bool


def f8_count(products: Sequence[Product], *, units: bool) -> F8Count:
    """Count the products of a step that are in 8 bits or fewer."""
    inside = [product for product in products if product.in_f8]
    # In a step without a recipe no product is eligible; then all count, and the share is 0.
    eligible = [product for product in products if product.of_recipe] or products
    return F8Count(
        count=sum(product.count for product in inside),
        total=sum(product.count for product in products),
        flops=_share(inside, products),
        eligible=_share(inside, eligible),
        units=units,
    )


def _share(part: Sequence[Product], whole: Sequence[Product]) -> float:
    total = math.fsum(product.flops for product in whole)
    return math.fsum(product.flops for product in part) / total if total else 1.0


def no_units(target: str) -> str:
    """Describe what a target without fp8 units does."""
    return f"{target} has no fp8 units, and multiplies operands of 8 bits at the rate of 16"


def described(product: Product) -> str:
    """Describe a product that is not in 8 bits, on one line."""
    where = product.source or "-"
    return (
        f"{where}: {product.lhs} x {product.rhs} ({product.count}x, {flops(product.flops)}), "
        f"{product.name or 'no name'}: {product.why_not}"
    )
