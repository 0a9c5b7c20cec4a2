"""Draw the bytes per parameter of `docs/optimizers.md`: `python -m docs.generators.optimizers`.

Optax's optimizers in float32 and `halfstep.optim`'s are initialized by shape, and the bytes of
parameters and state are counted by what they hold.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from docs.generators._draw import Theme, save_all
from halfstep import optim

SHAPE = (4096, 12288)
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "missing bits": ("low",),
        "momentum": ("first", "mu", "trace"),
        "second moment": ("second", "nu"),
    }
)
"""What a state holds, by the names of its fields in Optax and in halfstep."""
PARAMETERS = "parameters"


def plain(optimizer: optax.GradientTransformation) -> Callable[[Any], tuple[Any, Any]]:
    return lambda params: (params, optimizer.init(params))


MADE: Mapping[str, Callable[[Any], tuple[Any, Any]]] = MappingProxyType(
    {
        "optax.adamw": plain(optax.adamw(1e-3)),
        "flash_adamw, 32 bits": optim.flash_adamw(1e-3, master_bits=32).prepare,
        "flash_adamw": optim.flash_adamw(1e-3).prepare,
        "optax.lion": plain(optax.lion(1e-4)),
        "flash_lion": optim.flash_lion(1e-4).prepare,
        "optax.sgd, momentum": plain(optax.sgd(1e-2, 0.9)),
        "flash_sgd, momentum": optim.flash_sgd(1e-2, 0.9).prepare,
        "flash_sgd": optim.flash_sgd(1e-2).prepare,
    }
)
"""Functions from parameters to the parameters and the state of a run."""


def counted(make: Callable[[Any], tuple[Any, Any]]) -> dict[str, float]:
    """Bytes per parameter, by part; a number that all of them share is too small to be seen."""
    count = SHAPE[0] * SHAPE[1]
    params, state = jax.eval_shape(make, {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)})
    found = {PARAMETERS: optim.stored_bytes(params) / count}
    for path, leaf in jax.tree.leaves_with_path(state):
        names = {getattr(key, "name", None) for key in path}
        parts = [part for part, fields in PARTS.items() if names & set(fields)]
        size = leaf.size * leaf.dtype.itemsize / count
        if parts:
            found[parts[0]] = found.get(parts[0], 0.0) + size
        elif leaf.ndim:
            raise ValueError(f"what is {jax.tree_util.keystr(path)}? Name it in PARTS.")
    return found


def draw(figure: Figure, theme: Theme) -> None:
    axes = figure.subplots()
    rows = {name: counted(make) for name, make in MADE.items()}
    shades = dict(
        zip((PARAMETERS, *PARTS), (theme.blue, theme.gray, theme.orange, theme.green), strict=True)
    )
    for part, shade in shades.items():
        sizes = [row.get(part, 0.0) for row in rows.values()]
        before = [
            sum(row.get(other, 0.0) for other in list(shades)[: list(shades).index(part)])
            for row in rows.values()
        ]
        axes.barh(range(len(rows)), sizes, left=before, height=0.66, color=shade, label=part)
    for place, row in enumerate(rows.values()):
        total = sum(row.values())
        # Half of the last digit is rounded up, as the page's numbers are.
        said = f"{total + 1e-9:.3f}".rstrip("0").rstrip(".")
        axes.text(total + 0.15, place, said, va="center")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 13.5)
    axes.set_xticks(range(0, 13, 4))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("bytes per parameter, without gradients")
    figure.legend(loc="outside upper center", ncols=2)


PICTURES = {"optimizers-bytes": (draw, 4.4)}


def main() -> None:
    save_all(PICTURES)


if __name__ == "__main__":
    main()
