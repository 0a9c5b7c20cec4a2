"""What a program of another package is, and the numbers it is called with."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Made = tuple[Callable[..., Any], Any, tuple[Any, ...]]
"""A loss, its parameters and its other arguments."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One program.

    Attributes:
        name: Its name.
        package: The distribution it comes from.
        modules: What is imported for it.
        make: Makes the loss, its parameters and its data.
        without: Policies under which the package itself raises, unless `EQX_ON_ERROR` is "nan".
        note: What a reader of its row should know.
    """

    name: str
    package: str
    modules: tuple[str, ...]
    make: Callable[[], Made]
    without: tuple[str, ...] = ()
    note: str = ""


class Registry:
    """Programs in the order of their definition."""

    def __init__(self) -> None:
        self.examples: dict[str, Example] = {}

    def add(
        self, package: str, *modules: str, without: tuple[str, ...] = (), note: str = ""
    ) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
        """A decorator for a function that makes a program.

        Args:
            package: The distribution.
            modules: What is imported; the package itself, unless it is named otherwise.
            without: Policies under which the package itself raises, unless `EQX_ON_ERROR` is "nan".
            note: For the row of the program.
        """

        def register(make: Callable[[], Made]) -> Callable[[], Made]:
            name = make.__name__
            if name in self.examples:
                raise ValueError(f"two programs are named {name}")
            self.examples[name] = Example(name, package, modules or (package,), make, without, note)
            return make

        return register


class Numbers:
    """Random numbers of one program."""

    def __init__(self, seed: int = 0) -> None:
        self.state = np.random.RandomState(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Normal numbers in float32."""
        return np.asarray(scale * self.state.randn(*shape), np.float32)

    def integers(self, high: int, *shape: int, low: int = 0) -> np.ndarray:
        """Integers below a bound."""
        return self.state.randint(low, high, shape).astype(np.int32)

    def filled(self, shapes: Any) -> Any:
        """Parameters of shapes, as an initializer would make them, in little time."""

        def fill(path: Any, leaf: Any) -> Any:
            name = jax.tree_util.keystr(path).lower()
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                return np.zeros(leaf.shape, leaf.dtype)
            norms = ("scale", "gamma", "var")
            if any(part in name for part in norms) or ("weight" in name and len(leaf.shape) == 1):
                made = 1 + 0.1 * np.abs(self.state.randn(*leaf.shape))
            elif len(leaf.shape) < 2:
                made = 0.05 * self.state.randn(*leaf.shape)
            else:
                fan = leaf.shape[0] if len(leaf.shape) == 3 else np.prod(leaf.shape[:-1])
                made = self.state.randn(*leaf.shape) / np.sqrt(fan)
            return np.asarray(made, leaf.dtype)

        return jax.tree_util.tree_map_with_path(fill, shapes)

    def initialized(self, init: Callable[..., Any], *args: Any) -> Any:
        """What an initializer would return, filled with these numbers."""
        return self.filled(jax.eval_shape(init, *args))


def scalar(value: float) -> np.ndarray:
    """A parameter without dimensions."""
    return np.asarray(value, np.float32)


def cross_entropy(logits: jax.Array, labels: Any) -> jax.Array:
    """The mean over all labels."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def next_token(logits: jax.Array, tokens: Any) -> jax.Array:
    """The loss of a language model."""
    return cross_entropy(logits[:, :-1], tokens[:, 1:])
