"""The largest batch of a 7 B decoder with a plan, and without one.

    python -m benchmarks.plan_batches --json FILE
    python -m benchmarks.plan_batches --resume --json FILE

A decoder of the shape of LLaMA 7 B with 2,048 tokens, its parameters, the state of AdamW and the
batch divided over all devices (FSDP), compiled by XLA's own compilers for eight H100s and for four
chips of a TPU v5p that are not there. The loss is a plain scan over layers. Nothing is run. FILE is
written after every search.
"""

import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

# Before JAX is imported: steps are traced here and compiled elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax
from tqdm import tqdm

import halfstep
from benchmarks._plan_tables import batches_text
from benchmarks._report import parser, report, write
from benchmarks._scale_steps import DONATED, RATE, Model, Size, beside, model
from benchmarks.scale import LARGE, PACKAGES, TINY
from halfstep._preflight.target.targets import parse_target

MODULE = "benchmarks.plan_batches"
TARGETS = ("h100:8", "v5p:2x2x1")
GEMM: Mapping[str, Any] = MappingProxyType({"h100:8": "library", "v5p:2x2x1": "auto"})
MOST = 512
"""The largest batch of one device that is tried; 4 in a quick run."""
Made = tuple[Callable[[Any], Callable[..., Any]], tuple[Any, ...]]


def made(size: Size, devices: int, examples: int, *, remat: bool) -> Made:
    """A maker of steps, and a step's arguments with so many sequences on each device."""
    decoder = model(dataclasses.replace(size, examples=examples), devices)
    optimizer = optax.adamw(RATE)
    state = beside(jax.eval_shape(optimizer.init, decoder.params), decoder.params)
    loss = decoder.loss if remat else functools.partial(_plain_loss, decoder)

    def of_policy(policy: Any) -> Callable[..., Any]:
        def step(params: Any, opt_state: Any, ids: Any) -> Any:
            value, _, finite, grads = halfstep.filter_value_and_grad(loss, policy=policy)(
                params, ids
            )
            params, opt_state = halfstep.optimizer_update(
                params, optimizer, opt_state, grads, finite
            )
            return params, opt_state, value

        return step

    return of_policy, (decoder.params, state, decoder.batch)


def _plain_loss(decoder: Model, params: Any, ids: Any) -> Any:
    """A scan over layers as people write it."""
    parts, outer = decoder.functions(), params["outer"]

    def body(x: Any, layer: Any) -> Any:
        return parts["layer"](layer, x, outer, ids), None

    x, _ = jax.lax.scan(body, parts["first"](outer, ids), params["layers"])
    return parts["last"](outer, x, ids)


def largest(
    size: Size, target: str, most: int, *, policy: Any = "bf16", remat: bool = False
) -> Any:
    """The largest batch that fits with a policy."""
    devices = parse_target(target).devices

    def step_for_batch(batch: int) -> Any:
        of_policy, args = made(size, devices, batch // devices, remat=remat)
        return of_policy(policy), args

    return halfstep.preflight.largest_batch(
        step_for_batch,
        target=target,
        multiple_of=devices,
        maximum=most * devices,
        donate_argnums=DONATED,
        gemm=GEMM[target],
        progress=False,
    )


def planned(size: Size, target: str, batch: int, **options: Any) -> halfstep.MemoryPlan:
    """A plan for a batch over all devices."""
    devices = parse_target(target).devices
    of_policy, args = made(size, devices, batch // devices, remat=False)
    return halfstep.plan(
        of_policy,
        args,
        target=target,
        donate_argnums=DONATED,
        gemm=GEMM[target],
        progress=False,
        **options,
    )


def compare(size: Size, target: str, most: int = MOST) -> list[dict[str, Any]]:
    """A row for the step as it is, with every layer recomputed by hand, and with plans."""
    devices = parse_target(target).devices
    plain, by_hand = (largest(size, target, most, remat=remat) for remat in (False, True))
    flops = _flops(plain.entry) * devices / plain.batch
    rows = [
        {
            "way": way,
            "batch": found.batch,
            "peak_bytes": found.entry.peak_bytes,
            "recomputed": _flops(found.entry) * devices / found.batch / flops - 1,
        }
        for way, found in (("as it is", plain), ("every layer recomputed by hand", by_hand))
    ]
    # What a plan stores least is nearly the same for every batch: one tells which rules to search
    # the largest batch with, and that batch then has a plan of its own.
    some = planned(size, target, plain.batch + devices)
    smallest = min(some.front, key=lambda found: found.peak_bytes or sys.maxsize)
    found = largest(size, target, most, policy=smallest.policy)
    for way, batch in (
        ("plan, at the batch by hand", by_hand.batch),
        ("plan, at its largest batch", found.batch),
    ):
        try:
            plan = planned(size, target, batch)
        except halfstep.DoesNotFitError:
            # The layers that are recomputed by hand take a little less there.
            continue
        rows.append(
            {
                "way": way,
                "batch": batch,
                "peak_bytes": plan.peak_bytes,
                "recomputed": plan.recomputed_flops * devices / batch / flops,
                "offloaded_bytes": plan.offloaded_bytes,
                "compiles": len(plan.front),
                "rules": [str(rule) for rule in plan.policy.stores],
            }
        )
    return [{"size": size.name, "target": target, **row} for row in rows]


def _flops(entry: halfstep.PreflightEntry) -> int:
    return sum((entry.contraction_flops() or {}).values())


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, print, write."""
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="a tiny decoder on eight H100s")
    options.add_argument("--resume", action="store_true", help="go on with the run of FILE")
    given = options.parse_args(argv)
    size, targets = (TINY, TARGETS[:1]) if given.quick else (LARGE, TARGETS)
    rows: list[dict[str, Any]] = []
    if given.resume and given.json and pathlib.Path(given.json).exists():
        rows = json.loads(pathlib.Path(given.json).read_text())["rows"]
    done = {row["target"] for row in rows}
    result: dict[str, Any] = {}
    for target in tqdm([target for target in targets if target not in done], unit="target"):
        rows += compare(size, target, 4 if given.quick else MOST)
        result = report(MODULE, {"rows": rows}, packages=PACKAGES)
        if given.json and given.json != "-":
            write(result, given.json)
    result = result or report(MODULE, {"rows": rows}, packages=PACKAGES)
    print(batches_text(result))
    write(result, given.json)


if __name__ == "__main__":
    main()
