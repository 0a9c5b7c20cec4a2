"""A mixture of experts, a language model of bytes on Python's own library, with products in fp8.

    python -m examples.moe_fp8
    python -m examples.moe_fp8 --policy f8-row
    python -m examples.moe_fp8 --policy bf16

The products of activations and weights, those of the experts included, run in 8 bits, forward and
backward. The router stays in float32, by a rule: a token must not go to another expert for a
rounding. At the end there is a table of what was lost of each product, and of those that were
taken out of fp8 on the way, which the ledger has.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, UInt8

import halfstep
from examples import _mesh, _moe
from examples._log import Log, Record
from examples._plot import plot_run
from examples._text import Batches, python_library

POLICIES = ("f32", "bf16", *(name for name, r in halfstep.RECIPES.items() if not r.is_random))
OUT = pathlib.Path("runs/moe_fp8")
Text = UInt8[Array, "batch length"]
State = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes."""

    policy: str = "f8"
    seed: int = 0
    steps: int = 300
    batch: int = 16
    tokens: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    experts: int = 4
    text: int = 2_000_000
    learning_rate: float = 3e-3
    log_every: int = 10
    eval_every: int = 50

    @property
    def rules(self) -> str:
        """The policy as it is used: with the router in float32."""
        return self.policy if self.policy == "f32" else f"{self.policy},scope:router=float32"


def lost(scaling: Any) -> str:
    """A table of the last step: what was seen and lost of each product."""
    lines = [f"{'product':34}{'of the':12}{'largest':>10}{'saturated':>11}{'flushed':>9}"]
    for name, site in scaling.sites.items():
        # A loop has a row for each iteration: take the worst of the layers.
        seen = np.asarray(site.seen).reshape(-1, 3, 3).max(axis=0)
        for part, (largest, cut, zero) in zip(
            ("activation", "weight", "gradient"), seen, strict=True
        ):
            lines.append(f"{name:34}{part:12}{largest:10.2g}{cut:11.2%}{zero:9.2%}")
            name = ""
    return "\n".join(lines)


def train(config: Config, out: pathlib.Path) -> tuple[list[Record], State]:
    """One run. It writes `out/metrics.jsonl`; returns its records and the last state."""
    text = python_library(config.text)
    cut, rows = int(0.95 * len(text)), _mesh.rows(_mesh.make_mesh(1))
    options = {"length": config.tokens + 1, "batch": config.batch, "sharding": rows}
    batches = Batches(text[:cut], seed=config.seed, **options)
    held_out = next(Batches(text[cut:], seed=0, **{**options, "batch": 4 * config.batch}))
    scores = functools.partial(_moe.scores, heads=config.heads)
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.steps)
    optimizer = optax.adamw(schedule, b2=0.99, weight_decay=0.05)

    def loss(params: Any, text: Text) -> Array:
        return scores(params, text).loss

    @jax.jit
    def step_fn(state: State, text: Text) -> tuple[Array, State]:
        value, scaling, finite, grads = halfstep.filter_value_and_grad(
            loss, state["scaling"], policy=config.rules, check_finite=True
        )(state["params"], text)
        params, optimizer_state = halfstep.optimizer_update(
            state["params"], optimizer, state["optimizer"], grads, finite
        )
        new = {"params": params, "optimizer": optimizer_state, "scaling": scaling}
        return value, {**new, "ledger": state["ledger"].record(finite)}

    eval_fn = jax.jit(halfstep.autocast(scores, config.rules))
    sizes = {name: getattr(config, name) for name in ("tokens", "width", "layers", "experts")}
    params = _moe.init(**sizes, key=jax.random.key(config.seed))
    scaling: Any = halfstep.NoLossScaling()
    if config.policy in halfstep.RECIPES:
        recipe = halfstep.RECIPES[config.policy]
        scaling = recipe.init(loss, params, held_out, policy=config.rules)
    state: State = {
        "params": params,
        "optimizer": optimizer.init(params),
        "scaling": scaling,
        "ledger": halfstep.Ledger(limit=50),
    }
    out.mkdir(parents=True, exist_ok=True)
    with Log(out / "metrics.jsonl", name=config.policy, steps=config.steps) as log:
        for step, batch in zip(range(1, config.steps + 1), batches, strict=False):
            value, state = step_fn(state, batch)
            log.tick()
            evaluates = step == config.steps or step % config.eval_every == 0
            if not evaluates and step % config.log_every:
                continue
            if config.policy in halfstep.RECIPES:
                # A product that loses too much for too long runs in bfloat16 from here on.
                scaling, ledger = state["ledger"].review(state["scaling"])
                state = {**state, "scaling": scaling, "ledger": ledger}
            state["ledger"].check(state["params"], scaling=state["scaling"])
            record: Record = {
                "step": step,
                "loss": float(value),
                "loss_scale": float(np.asarray(state["scaling"].loss_scaling)),
                "skipped": int(state["ledger"].skipped),
            }
            if evaluates:
                found = eval_fn(state["params"], held_out)
                record |= {
                    "held_out_loss": float(found.nats),
                    "test_accuracy": float(found.accuracy),
                    "load": np.asarray(found.load).tolist(),
                }
            log.write(record)
    return log.records, state


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.moe_fp8",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in dataclasses.fields(Config):
        name, kind = f"--{field.name.replace('_', '-')}", type(field.default)
        choices = POLICIES if field.name == "policy" else None
        help = f"({field.default})"
        parser.add_argument(name, type=kind, default=field.default, choices=choices, help=help)
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help=f"({OUT})")
    options = vars(parser.parse_args(argv))
    out, config = options.pop("out"), Config(**options)
    records, state = train(config, out)
    plot_run(records, out / "curves.png", title=f"{config.experts} experts, {config.policy}")
    if config.policy in halfstep.RECIPES:
        print(lost(state["scaling"]))
        names = [f"{name} after step {step}" for name, step in state["ledger"].fallbacks]
        print(f"Taken out of {config.policy}: {', '.join(names) or 'nothing'}")
    end = records[-1]
    for layer, load in enumerate(end["load"]):
        shares = " ".join(f"{part:.0%}" for part in load)
        print(f"Tokens of each expert, layer {layer}: {shares}")
    print(f"held-out accuracy {end['test_accuracy']:.2%}", end="  ")
    print(f"bits a byte {end['held_out_loss'] / jnp.log(2):.3f}  steps skipped {end['skipped']}")
    print(f"Metrics and curves: {out}")


if __name__ == "__main__":
    main()
