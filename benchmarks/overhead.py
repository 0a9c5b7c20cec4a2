"""What halfstep's wrapper costs, beside the step written by hand, mpx, jmp and jaxamp.

Two exact figures from the compiled program, instructions and temporary memory, and ratios of times
from interleaved runs in one process. The reference is the hand-written float16 step *without* a
gate, so everything that makes a step safe counts as cost; times are also given beside the
hand-written step that is safe, by a select for each leaf.
"""

import functools
import importlib.util
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from tqdm import tqdm

import halfstep
from benchmarks import _environments
from benchmarks._environments import MissingEnvironmentError
from benchmarks._peers import _overhead
from benchmarks._peers._overhead import (
    GATED as GATED,
    MODEL,
    OPTIMIZER,
    REFERENCE,
    hand_written,
    instructions as instructions,
    plain,
    with_jmp,
    with_mpx,
)
from benchmarks._report import parser, report, table, write
from tests.models.vit import loss

MODULE = "benchmarks.overhead"


def with_halfstep(gate: Any, params: Any, state: Any, scaling: Any, ledger: Any, x, y, static):
    """The same step with halfstep: a verdict that names the leaf, and a ledger, come with it."""
    model = eqx.combine(params, static)
    # Casting arguments, as all the others do: the wrapper's cost, and not another program's.
    gradient = halfstep.filter_value_and_grad(loss, scaling, policy="f16:inputs")
    value, scaling, finite, grads = gradient(model, x, y)

    def commit(old):
        return halfstep.apply_gradients(old[0], OPTIMIZER, old[1], grads)

    (model, state), ledger = halfstep.transaction(finite, commit, (model, state), ledger, gate=gate)
    return eqx.filter(model, eqx.is_inexact_array), state, scaling, ledger, value


def variants() -> dict[str, Any]:
    """Each step, and the scaling and counter state it begins with."""
    ours = lambda: (halfstep.DynamicLossScaling(2.0**10), halfstep.Ledger())  # noqa: E731
    made: dict[str, Any] = dict(hand_written())
    for gate in ("loop", "cond", "select"):
        name = "halfstep" if gate == "loop" else f'halfstep, gate="{gate}"'
        made[name] = (functools.partial(with_halfstep, gate), ours)
    try:
        import mpx

        floor = jnp.ones((), jnp.float32)
        made["mpx"] = (
            with_mpx,
            lambda: (mpx.DynamicLossScaling(jnp.float32(2.0**10), floor), jnp.int32(0)),
        )
    except ImportError:
        print("mpx is not installed and left out: pip install mixed-precision-for-JAX")
    if importlib.util.find_spec("jmp") is not None:
        made["jmp"] = (with_jmp, plain)
    else:
        print("jmp is not installed and left out: pip install jmp")
    return made


def measure(
    *, rounds: int, batch: int, options: dict[str, int], only: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """One row for each variant: exact figures of its program and its interleaved time ratio."""
    chosen = {name: made for name, made in variants().items() if not only or name in only}
    return _overhead.measure(chosen, rounds=rounds, batch=batch, options=options, progress=tqdm)


def elsewhere(*, rounds: int, batch: int) -> list[dict[str, Any]]:
    """The row of jaxamp, beside the step by hand on the JAX that it needs."""
    argv = ["jaxamp", "--rounds", str(rounds), "--batch", str(batch)]
    settings = {"JAX_PLATFORMS": "cpu"}
    try:
        made = _environments.run("jaxamp", "benchmarks._peers._overhead", argv, settings=settings)
    except MissingEnvironmentError as error:
        print(f"jaxamp is left out: {error}")
        return []
    versions = made["versions"]
    return [{**made["row"], "step": f"jaxamp, on JAX {versions['jax']}", "versions": versions}]


NARROW = {"width": 64, "hidden": 128, "heads": 4, "blocks": 4}
"""A model with more and smaller parameters, for which a gate costs more."""


def narrow(batch: int) -> dict[str, Any]:
    """The instructions of the step by hand and of halfstep's, of the narrow model."""
    rows = measure(rounds=0, batch=batch, options=NARROW, only=(REFERENCE, "halfstep"))
    return {"model": NARROW, "rows": rows}


COLUMNS = {
    "step": "step",
    "time_ratio": "time",
    "time_ratio_to_gated": "to by hand, select",
    "instruction_ratio": "instructions",
    "temporary_ratio": "temporaries",
    "instructions": "count",
    "temporaries": "bytes",
}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = parser(MODULE, __doc__ or "")
    arguments.add_argument("--rounds", type=int, default=200, help="interleaved timed runs of each")
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument(
        "--peers", action="store_true", help="also jaxamp, in an environment of its own"
    )
    parsed = arguments.parse_args(argv)
    rows = measure(rounds=parsed.rounds, batch=parsed.batch, options=MODEL)
    if parsed.peers:
        rows += elsewhere(rounds=parsed.rounds, batch=parsed.batch)
    results = report(
        MODULE,
        {
            "model": {"kind": "ViT", "image": 32, "patch": 4, "batch": parsed.batch, **MODEL},
            "policy": "f16:inputs",
            "optimizer": "adamw",
            "reference": REFERENCE,
            "rounds": parsed.rounds,
            "rows": rows,
            "narrow": narrow(parsed.batch),
        },
        packages=("mixed-precision-for-JAX", "jmp"),
    )
    if parsed.json != "-":
        print(table(rows, COLUMNS))
    write(results, parsed.json)
    return results


if __name__ == "__main__":
    main()
