"""Draw one step of `docs/tour.md` with its dtypes: `python -m docs.generators.tour`.

The step is the one that the page's own blocks define. Its dtypes are those of the arrays that it
takes and returns, and those that `halfstep.explain` reports.
"""

import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

import halfstep
from docs.generators._draw import Theme, arrow, bare, box, save_all

PAGE = pathlib.Path(__file__).parents[1] / "tour.md"
LAST = "opt_state"
"""The name that the page's complete step takes; the blocks up to it are run."""


@functools.cache
def of_the_page() -> Mapping[str, Any]:
    """The names that the page's blocks define, up to the one with the complete step."""
    namespace: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        # The page is written for JAX's defaults.
        with jax.numpy_dtype_promotion("standard"):
            exec(compile(code, str(PAGE), "exec"), namespace)
        if LAST in namespace:
            return namespace
    raise ValueError(f"no block of {PAGE.name} defines {LAST}")


def dtypes(tree: Any) -> str:
    """The dtypes of a tree's floating-point arrays."""
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return ", ".join(sorted({leaf.dtype.name for leaf in leaves}))


def steps() -> list[tuple[str, str, bool]]:
    """What a step does, one after the other: a title, its dtypes, and whether it has 16 bits."""
    page = of_the_page()
    model, batch, scaling = page["model"], page["batch"], halfstep.DynamicLossScaling()
    operations = halfstep.explain(page["loss_fn"], "f16")(model, batch).operations
    products = {entry.outs[0].dtype for entry in operations if entry.is_contraction}
    sums = {entry.outs[0].dtype for entry in operations if entry.name == "reduce_sum"}
    transform = halfstep.filter_value_and_grad(page["loss_fn"], scaling, policy="f16")
    loss, _, _, grads = transform(model, batch)
    compute = ", ".join(sorted(products))
    low = products != {"f32"}
    return [
        ("parameters", dtypes(model), False),
        ("loss_fn, rewritten by autocast", f"products {compute}, sums {', '.join(sums)}", low),
        (f"loss x {int(scaling.loss_scaling):,}", dtypes(loss), False),
        ("backward pass", f"products {compute}", low),
        (f"gradients / {int(scaling.loss_scaling):,}", dtypes(grads), False),
    ]


def outcomes() -> dict[bool, str]:
    """What follows from each verdict, as the functions do it."""
    page = of_the_page()
    model, optimizer = page["model"], page["optimizer"]
    params = eqx.filter(model, eqx.is_inexact_array)
    state = optimizer.init(params)
    made = {}
    for finite in (True, False):
        grads = jax.tree.map(jnp.ones_like, params)
        with jax.numpy_dtype_promotion("standard"):
            new, _ = halfstep.optimizer_update(model, optimizer, state, grads, jnp.asarray(finite))
        same = bool(eqx.tree_equal(new, model))
        scaling = halfstep.DynamicLossScaling(period=1)
        factor = float(scaling.adjust(jnp.asarray(finite)).loss_scaling / scaling.loss_scaling)
        period = int(halfstep.DynamicLossScaling().period)
        often = f"after {period:,} good\nsteps, scale" if factor > 1 else "scale"
        done = "skip: all as it was" if same else "update the model"
        made[finite] = f"{done};\n{often} x {factor:g}"
    return made


def draw(figure: Figure, theme: Theme) -> None:
    axes = figure.subplots()
    found, middle, gap, height = steps(), 2.5, 1.12, 0.78
    for place, (title, dtype, low) in enumerate(found):
        shade = theme.blue if low else theme.orange
        text = f"{title}\n{dtype}"
        look = {"fill": shade, "edge": shade, "ink": theme.paper}
        box(axes, (middle, -gap * place), (4.2, height), text, **look, fontsize=10.5)
        end = -gap * (place + 1) + height / 2
        arrow(axes, (middle, -gap * place - height / 2), (middle, end), theme.ink)
    verdict = -gap * len(found)
    plain = {"edge": theme.ink, "ink": theme.ink}
    asked = "verdict: loss and all\ngradients finite?"
    box(axes, (middle, verdict), (4.2, height), asked, **plain, fontsize=10.5)
    for (finite, said), x in zip(outcomes().items(), (1.22, 3.78), strict=True):
        bottom = verdict - 1.6
        box(axes, (x, bottom), (2.38, 1.1), said, **plain, fontsize=10.5)
        arrow(axes, (x, verdict - height / 2), (x, bottom + 0.55), theme.ink)
        axes.text(x + 0.1, verdict - 0.72, "yes" if finite else "no", va="center")
    axes.set_xlim(0, 5)
    axes.set_ylim(verdict - 2.25, height / 2 + 0.1)
    bare(axes)


PICTURES = {"tour-step": (draw, 7.2)}


def main() -> None:
    save_all(PICTURES)


if __name__ == "__main__":
    main()
