"""Train a language model of bytes on Python's own library: one device, many, or many processes.

    python -m examples.gpt_fsdp
    python -m examples.gpt_fsdp --policy f8 --optimizer flash --microbatches 2

With a plan for a memory budget, which is made without the hardware:

    halfstep plan examples.gpt_fsdp:plan_step --target rtx4070 --budget 100MiB --out plan.toml
    python -m examples.gpt_fsdp --policy plan.toml

Two processes on one machine that share one copy of the parameters (FSDP):

    python -m examples.gpt_fsdp --coordinator 127.0.0.1:9876 --processes 2 --process 0 --fsdp 2 &
    python -m examples.gpt_fsdp --coordinator 127.0.0.1:9876 --processes 2 --process 1 --fsdp 2

On a pod it is the same on each host, with the address of the first one. Kill any of them at any
time and start all again with the same options: the run goes on from its newest good checkpoint
and ends with the same bits.

The model (`_gpt.py`) is written in float32 for one device. Mixed precision is in `initial_state`
and `train_step`; where things are is in `_mesh.py`.
"""

import argparse
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, UInt8

import halfstep
from examples import _gpt, _mesh
from examples._log import Log, Record
from examples._plot import plot_run
from examples._text import Batches, digest, python_library
from halfstep import optim
from halfstep.integrations.orbax import Checkpoints
from halfstep.reliability import Preemption, Watchdog, replica_check

POLICIES = ("f32", "bf16", "f16", *halfstep.RECIPES)
OUT = pathlib.Path("runs/gpt_fsdp")
Text = UInt8[Array, "batch length"]
State = dict[str, Any]
"""All that changes from step to step: parameters, optimizer, scaling, ledger."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes. Two runs of one config are the same run."""

    policy: str = "bf16"
    optimizer: str = "adamw"
    seed: int = 0
    steps: int = 300
    batch: int = 16
    microbatches: int = 1
    tokens: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    text: int = 4_000_000
    learning_rate: float = 2e-3
    loss_scale: float = 2.0**15
    growth_period: int = 100
    log_every: int = 10
    eval_every: int = 50

    @property
    def label(self) -> str:
        """The policy in a word."""
        return self.policy if self.policy in POLICIES else "planned"


def make_optimizer(config: Config) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """The optimizer, and what makes its parameters and its state of float32 parameters."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, max(1, config.steps // 10), config.steps
    )
    if config.optimizer == "flash":
        # Parameters in bfloat16, and what they lack and both moments in 3 bytes more.
        flash = optim.flash_adamw(schedule, b2=0.99, weight_decay=0.05)
        return flash, flash.prepare
    adamw = optax.adamw(schedule, b2=0.99, weight_decay=0.05)
    return adamw, lambda params: (params, adamw.init(params))


def initial_state(config: Config, mesh: Mesh, text: Text) -> State:
    """The state before the first step, made where it is to be: no device holds all of it."""

    def make(key: Array, text: Text) -> State:
        sizes = {"tokens": config.tokens, "width": config.width, "layers": config.layers}
        params, optimizer_state = make_optimizer(config)[1](_gpt.init(**sizes, key=key))
        scaling: Any = halfstep.NoLossScaling()
        if config.policy == "f16":
            scaling = halfstep.DynamicLossScaling(config.loss_scale, period=config.growth_period)
        elif config.policy in halfstep.RECIPES:
            recipe, key = halfstep.RECIPES[config.policy], jax.random.fold_in(key, 1)
            random = {"key": key} if recipe.is_random else {}
            scaling = recipe.init(loss_of(config), params, text, **random)
        return {
            "params": params,
            "optimizer": optimizer_state,
            "scaling": scaling,
            "ledger": halfstep.Ledger(limit=50),
        }

    key = jax.random.key(config.seed)
    shapes = jax.eval_shape(make, key, text)
    params = _mesh.shard_params(shapes["params"], mesh)
    shardings = {
        **_mesh.everywhere(shapes, mesh),
        "params": jax.tree.map(lambda leaf: leaf.sharding, params),
        "optimizer": optim.state_shardings(shapes["optimizer"], params),
    }
    return jax.jit(make, out_shardings=shardings)(key, text)


def loss_of(config: Config) -> Callable[..., Array]:
    return functools.partial(_gpt.loss, heads=config.heads)


def plan_step(policy: str = "bf16", batch: int = Config.batch) -> tuple[Callable[..., Any], Any]:
    """The step on one device for a policy and the shapes of its arguments, for `halfstep plan`."""
    config = Config(policy=policy, batch=batch)
    text = jax.ShapeDtypeStruct((batch, config.tokens + 1), np.uint8)
    sizes = {"tokens": config.tokens, "width": config.width, "layers": config.layers}
    params, state = jax.eval_shape(
        lambda key: make_optimizer(config)[1](_gpt.init(**sizes, key=key)), jax.random.key(0)
    )
    whole = {
        "params": params,
        "optimizer": state,
        "scaling": halfstep.NoLossScaling(),
        "ledger": jax.eval_shape(lambda: halfstep.Ledger(limit=50)),
    }
    return make_step(config, whole), (whole, text)


def make_step(config: Config, state: State) -> Callable[[State, Text], tuple[Array, State]]:
    """One step, compiled as a whole. The old state's memory becomes the new state's."""
    optimizer, _ = make_optimizer(config)

    def train_step(state: State, text: Text) -> tuple[Float[Array, ""], State]:
        value, scaling, finite, grads = halfstep.filter_value_and_grad(
            loss_of(config),
            state["scaling"],
            policy=config.policy,
            check_finite=True,
            microbatches=config.microbatches,
            batch=("text",),
        )(state["params"], text)

        # On a bad batch, of any process, nothing below changes, on all of them.
        params, optimizer_state = halfstep.optimizer_update(
            state["params"], optimizer, state["optimizer"], grads, finite
        )
        ledger = state["ledger"].record(finite)
        return value, {
            "params": params,
            "optimizer": optimizer_state,
            "scaling": scaling,
            "ledger": ledger,
        }

    shardings = (None, jax.tree.map(lambda leaf: leaf.sharding, state))
    return jax.jit(train_step, donate_argnums=0, out_shardings=shardings)


def train(
    config: Config,
    mesh: Mesh,
    out: pathlib.Path,
    *,
    save_every: int,
    check_every: int,
    hang_after: float,
) -> list[Record]:
    """One run. It writes `out/metrics.jsonl` and `out/checkpoints`, and returns its records."""
    text = python_library(config.text)
    cut, length = int(0.95 * len(text)), config.tokens + 1
    options = {"length": length, "batch": config.batch, "sharding": _mesh.rows(mesh)}
    batches = Batches(text[:cut], seed=config.seed, **options)
    held_out = next(Batches(text[cut:], seed=0, **options))
    state = initial_state(config, mesh, held_out)
    step_fn = make_step(config, state)
    eval_fn = jax.jit(halfstep.autocast(loss_of(config), config.policy))
    with contextlib.ExitStack() as stack:
        run = {**dataclasses.asdict(config), "digest of the text": digest(text)}
        checkpoints = stack.enter_context(Checkpoints(out / "checkpoints", options=run))
        start = 0
        if checkpoints.latest() is not None:
            start, state = checkpoints.restore(state, data=batches.iterator)
        names = {"name": f"{config.label} {config.optimizer}", "steps": config.steps}
        is_first = jax.process_index() == 0
        log = stack.enter_context(Log(out / "metrics.jsonl", **names, start=start, active=is_first))
        preemption = stack.enter_context(Preemption())
        watchdog = stack.enter_context(Watchdog(hang_after))
        for step in range(start + 1, config.steps + 1):
            value, state = step_fn(state, next(batches))
            log.tick()
            last = step == config.steps
            if last or step % config.log_every == 0:
                # Raises once nothing but skips is left, and says where to look.
                state["ledger"].check(state["params"], scaling=state["scaling"])
                record: Record = {
                    "step": step,
                    "loss": float(value),
                    "loss_scale": float(np.asarray(state["scaling"].loss_scaling)),
                    "skipped": int(state["ledger"].skipped),
                }
                if last or step % config.eval_every == 0:
                    record["held_out_loss"] = float(eval_fn(state["params"], held_out))
                log.write(record)
            if step % check_every == 0:
                replica_check(state, step=step)
            stops = preemption.reached(step)
            if last or stops or step % save_every == 0:
                checkpoints.save(step, state, batches.iterator)
            watchdog.tick(step)
            if stops:
                print(f"stopped after step {step}; the same command goes on from there")
                break
    return log.records


def policy_of(text: str) -> str:
    """The policy of an option: a name, or the text of what a file has."""
    if text.endswith(".toml"):
        return str(halfstep.Policy.load(text))
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(
            f"required one of {', '.join(POLICIES)}, or a TOML file; got {text!r}"
        )
    return text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.gpt_fsdp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = {"optimizer": ("adamw", "flash")}
    types = {"policy": policy_of}
    for field in dataclasses.fields(Config):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=types.get(field.name, type(field.default)),
            default=field.default,
            choices=choices.get(field.name),
            help=f"({field.default})"
            + (f" one of {', '.join(POLICIES)}, or a file" if field.name == "policy" else ""),
        )
    add = parser.add_argument
    add("--fsdp", type=int, default=1, help="devices that share a copy of the parameters (1)")
    add("--save-every", type=int, default=50, help="steps between checkpoints (50)")
    add("--check-every", type=int, default=100, help="steps between comparisons of copies (100)")
    add(
        "--hang-after",
        type=float,
        default=300.0,
        help="seconds for a step, and 10 times that "
        "for the first, after which a process ends itself (300)",
    )
    add("--out", type=pathlib.Path, default=OUT, help=f"all processes must see it ({OUT})")
    add("--coordinator", help="address:port of process 0; without it there is one process")
    add("--processes", type=int, default=1, help="how many there are (1)")
    add("--process", type=int, default=0, help="which of them this is (0)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    config = Config(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Config)})
    with _mesh.processes(options.coordinator, options.processes, options.process):
        mesh = _mesh.make_mesh(options.fsdp)
        every = {"save_every": options.save_every, "check_every": options.check_every}
        records = train(config, mesh, options.out, **every, hang_after=options.hang_after)
        if jax.process_index() == 0 and records[-1]["step"] == config.steps:
            spread = " x ".join(f"{count} {axis}" for axis, count in mesh.shape.items())
            title = f"{config.label}, {config.optimizer}, devices: {spread}"
            plot_run(records, options.out / "curves.png", title=title)
            print(f"held-out loss {records[-1]['held_out_loss']:.4f}; see {options.out}")


if __name__ == "__main__":
    main()
