"""The loss scale of a short run in float16, begun far too high: where it skips, and where it stays.

    python -m benchmarks.loss_scaling --json FILE --plot PNG
    python -m benchmarks.loss_scaling --from FILE --plot PNG

A network of two layers learns a smooth function on this machine's CPU. The scale doubles more often
than by default, so that a run of a few hundred steps shows how it moves.
"""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import halfstep
from benchmarks._report import add_sources, parser, read_or_make, report, write

MODULE = "benchmarks.loss_scaling"
STEPS, QUICK_STEPS = 300, 30
FIRST_SCALE, PERIOD = 2.0**24, 20
WIDTH, BATCH, LEARNING_RATE = 128, 64, 3e-3


def loss_fn(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def measure(steps: int) -> dict[str, Any]:
    """Train, and keep the scale, the verdict and the loss of every step."""
    keys = jax.random.split(jax.random.key(0), 2)
    model = eqx.nn.MLP(8, 8, width_size=WIDTH, depth=2, key=keys[0])
    optimizer = optax.adam(LEARNING_RATE)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = halfstep.DynamicLossScaling(FIRST_SCALE, period=PERIOD)

    @eqx.filter_jit
    def step(model: Any, state: Any, scaling: Any, key: jax.Array) -> Any:
        x = jax.random.normal(key, (BATCH, 8))
        y = 4 * jnp.sin(2 * x)
        transform = halfstep.filter_value_and_grad(loss_fn, scaling, policy="f16")
        loss, scaling, finite, grads = transform(model, x, y)
        model, state = halfstep.optimizer_update(model, optimizer, state, grads, finite)
        return model, state, scaling, loss, finite

    rows = []
    for number in tqdm(range(steps), unit="step"):
        scale = float(scaling.loss_scaling)
        key = jax.random.fold_in(keys[1], number)
        model, state, scaling, loss, finite = step(model, state, scaling, key)
        rows.append({"scale": scale, "skipped": not bool(finite), "loss": float(loss)})
    return {
        "settings": {
            "first_scale": FIRST_SCALE,
            "period": PERIOD,
            "factor": 2,
            "steps": steps,
            "width": WIDTH,
            "batch": BATCH,
        },
        "skipped": sum(row["skipped"] for row in rows),
        "rows": rows,
    }


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw the scale with its skipped steps, above the loss."""
    from matplotlib.ticker import LogLocator, NullLocator

    from benchmarks._pictures import LIGHT, save, sheet

    rows: Sequence[Mapping[str, Any]] = made["rows"]
    figure = sheet(4.8)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1))
    scales = [row["scale"] for row in rows]
    above.step(range(len(rows)), scales, where="post", color=LIGHT.blue, linewidth=1.8)
    skipped = [number for number, row in enumerate(rows) if row["skipped"]]
    above.plot(
        skipped,
        [scales[number] for number in skipped],
        "o",
        color=LIGHT.red,
        markersize=5,
        label=f"skipped: {len(skipped)} of {len(rows)} steps",
    )
    above.set_yscale("log", base=2)
    above.yaxis.set_major_locator(LogLocator(base=2, numticks=12))
    above.yaxis.set_minor_locator(NullLocator())
    above.set_ylabel("loss scale")
    above.legend(frameon=False, loc="upper right")
    below.plot([row["loss"] for row in rows], color=LIGHT.blue, linewidth=1.4)
    below.set_ylim(bottom=0)
    below.set_ylabel("training loss")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path, made)


def text(result: Mapping[str, Any]) -> str:
    """What the page says about the run."""
    from benchmarks._images import markdown

    rows, settings = result["rows"], result["settings"]
    begun = next(number for number, row in enumerate(rows) if not row["skipped"])
    scales = [row["scale"] for row in rows[begun:]]
    later = sum(row["skipped"] for row in rows[begun:])
    exponents = [round(math.log2(scale)) for scale in (rows[0]["scale"], min(scales), max(scales))]
    image = markdown(
        "The loss scale over the steps of a run: it falls in the first steps, and then doubles now "
        "and then and is halved again by skipped steps, marked red. The loss below falls all the "
        "while",
        "loss_scaling",
    )
    return (
        f"A small network in float16, with `DynamicLossScaling(2**{exponents[0]}, "
        f"period={settings['period']})`. The first {begun} steps are skipped, and each halves the "
        f"scale. In the other {len(scales)} steps the scale stays between 2^{exponents[1]} and "
        f"2^{exponents[2]}: it doubles after {settings['period']} good steps in a row, and "
        f"{later} of them are skipped because it became too large.\n\n{image}\n\n"
        f"`python -m benchmarks.loss_scaling` trains it, in seconds, and "
        f"`python -m benchmarks.pictures loss_scaling` draws it."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or read an earlier report; write and draw it."""
    options = parser(MODULE, __doc__ or "")
    add_sources(options, drawn="the scale", quick=f"{QUICK_STEPS} steps")
    given = options.parse_args(argv)
    steps = QUICK_STEPS if given.quick else STEPS
    made = read_or_make(given, lambda: report(MODULE, measure(steps), packages=()))
    write(made, given.json)
    if given.plot:
        plot(made, given.plot)
    if given.json != "-":
        print(f"{made['skipped']} of {len(made['rows'])} steps were skipped")


if __name__ == "__main__":
    main()
