"""What one leaf's update consists of: its arrays, its scalars, and how it is written."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from halfstep.quant._codes import CODES, Code
from halfstep.quant._groups import Groups

Algorithm = Literal["adam", "lion", "sgd"]


class Leaf(NamedTuple):
    """A parameter and all that an optimizer stores for it. What it does not need is `None`."""

    param: Any
    """The parameter, as it is computed with: bfloat16 where `low` has the rest, or any float."""
    low: Any
    """The bits that a bfloat16 parameter lacks: 8 or 16 of them."""
    first: Any
    """Codes of the first moment, or of the momentum."""
    first_scale: Any
    second: Any
    """Codes of the second moment."""
    second_scale: Any

    @property
    def present(self) -> tuple[int, ...]:
        """Which fields it has."""
        return tuple(i for i, array in enumerate(self) if array is not None)


def leaf_of(present: Sequence[int], arrays: Iterable[Any]) -> Leaf:
    """A leaf of the fields that it has."""
    fields = dict(zip(present, arrays, strict=True))
    return Leaf(*(fields.get(i) for i in range(len(Leaf._fields))))


class Scalars(NamedTuple):
    """What changes from step to step. All are float32 scalars, traced or not."""

    rate: Any
    """The learning rate."""
    b1: Any
    b2: Any
    eps: Any
    decay: Any
    """Decoupled weight decay; a multiple of the learning rate."""
    first_bias: Any
    """`1 / (1 - b1**t)`."""
    second_bias: Any
    """`1 / sqrt(1 - b2**t)`."""
    keep: Any
    """0 where nothing is to change, since a gradient is not finite; else 1."""
    seed: Any
    """What randomness is drawn from, where rounding is random: a whole number below 2**24."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """How a leaf is updated: what no array says by itself."""

    algorithm: Algorithm
    groups: Groups
    nesterov: bool = False
    first_code: str = "int8"
    second_code: str = "root8"
    stochastic: bool = False
    """Whether the second moment and a split of 8 bits are rounded at random."""
    coupled: bool = False
    """Whether weights decay by their gradient, and not beside it."""

    @property
    def first(self) -> Code:
        """The code of the first moment."""
        return CODES[self.first_code]

    @property
    def second(self) -> Code:
        """The code of the second moment."""
        return CODES[self.second_code]


class Moments(NamedTuple):
    """A leaf's values in float32, while they are updated."""

    value: Any
    first: Any
    second: Any
    root: Any = None
    """The square root of the second moment, after a step."""
