"""JAX's coming defaults: halfstep with each configuration flag that is to change.

    python -m benchmarks.flags --json FILE [--only FLAG ...]

Each flag of the installed JAX that announces a change has its coming value in processes of their
own. One runs the conformance suite. Another one calls small programs, eagerly, compiled and
differentiated, by plain JAX and through `autocast`, and both are compared with what they are
without the flag. What differs or fails must do so in plain JAX as well, or be refused by halfstep.
The exit status is 1 otherwise. `--resume` keeps the rows of FILE: those of another JAX.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

from benchmarks._report import parser, report, table, versions, write
from benchmarks._resume import add_choice, earlier_report

MODULE = "benchmarks.flags"
COMING: Mapping[str, str] = MappingProxyType(
    {
        "jax_remat3": "true",
        "jax_scan3": "true",
        "jax_custom_vjp3": "true",
        "jax_custom_jvp3": "true",
        "jax_remat_barrier_no_cotangents": "true",
        "jax_enable_custom_prng": "true",
        "jax_softmax_custom_jvp": "true",
        "jax_disable_bwd_checks": "true",
        "jax_disable_vmap_shmap_error": "true",
        "jax_refs_to_pins": "true",
        "jax_use_simplified_jaxpr_constants": "true",
        "jax_remove_size_one_mesh_axis_from_type": "true",
        "jax_accurate_erf_inv": "true",
        "jax_explicit_x64_dtypes": "error",
        "jax_legacy_prng_key": "error",
        "jax_numpy_dtype_promotion": "strict",
        "jax_numpy_rank_promotion": "raise",
    }
)
"""The flags that JAX marks as an upgrade, or describes as temporary, and their coming values."""
SINCE: Mapping[str, str] = MappingProxyType(
    {
        "jax_threefry_partitionable": "true",
        "jax_mutable_array_checks": "true",
        "jax_use_shardy_partitioner": "true",
    }
)
"""Upgrades that are the default in every supported JAX: all tests run with them."""
NONE = "none"
UNTESTED: Mapping[str, Any] = MappingProxyType({"passed": 0, "failed": {}})
LEEWAY = 2.0**-6
"""The relative difference that another order of 16-bit operations explains."""
SHARED = 60
"""As many characters of a message are the same in all programs: then come types and shapes."""
SECONDS = 3600
_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_allow_excess_precision=false"
)
_ROOT = pathlib.Path(__file__).parents[1]


def _programs() -> dict[str, Callable[[Any], Any]]:
    """Functions of a matrix, one for each mechanism that a flag may change."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    from tests.models import gpt

    def layer(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(checkpoint_name(x @ x.T / 8, "scores")) @ x

    @jax.custom_jvp
    def by_jvp(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x.T)

    @by_jvp.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,), (moved,) = primals, tangents
        out = by_jvp(x)
        return out, (1 - jnp.square(out)) * (moved @ x.T + x @ moved.T)

    @jax.custom_vjp
    def by_vjp(x: jax.Array) -> jax.Array:
        return jnp.sin(x @ x.T)

    by_vjp.defvjp(
        lambda x: (by_vjp(x), x),
        lambda x, given: ((given * jnp.cos(x @ x.T)) @ x * 2,),
    )
    params = gpt.init(vocabulary=16, tokens=8, width=8, layers=2, key=jax.random.key(0))
    tokens = jnp.arange(18, dtype=jnp.int32).reshape(2, 9) % 16

    def model(scan: bool) -> Callable[[Any], Any]:
        def loss(x: jax.Array) -> jax.Array:
            moved = jax.tree.map(lambda leaf: leaf * jnp.mean(x), params)
            return gpt.loss(moved, tokens, heads=2, scan=scan)

        return loss

    policies = jax.checkpoint_policies
    ways: dict[str, Any] = {
        "jax.checkpoint": None,
        "dots_saveable": policies.dots_saveable,
        "names saved": policies.save_only_these_names("scores"),
    }
    made: dict[str, Callable[[Any], Any]] = {
        "products and softmax": layer,
        "scan": lambda x: jax.lax.scan(lambda c, _: (c + layer(c), None), x, length=3)[0],
        "sum over a scan": lambda x: jax.lax.scan(lambda c, v: (c + v, None), 0 * x[0], x)[0],
        "while_loop": lambda x: jax.lax.fori_loop(0, jnp.int32(2), lambda _, c: layer(c), x),
        "cond": lambda x: jax.lax.cond(x[0, 0] < 9, layer, jnp.tanh, x),
        "custom_jvp": by_jvp,
        "custom_vjp": by_vjp,
        "GPT": model(False),
        "GPT, scanned": model(True),
    }
    for name, policy in ways.items():
        made[name] = lambda x, policy=policy: jax.checkpoint(layer, policy=policy)(x) + x
    return made


def _child() -> None:
    """What all programs give, as JSON: a number or a message."""
    import jax
    import jax.numpy as jnp

    import halfstep

    x = jnp.linspace(0.5, 1.5, 64).reshape(8, 8)
    made: dict[str, dict[str, Any]] = {}
    for name, func in _programs().items():
        for who, called in {"jax": func, "halfstep": halfstep.autocast(func, "bf16")}.items():

            def total(x: jax.Array, called: Callable[[Any], Any] = called) -> jax.Array:
                return jnp.sum(called(x) ** 2)

            gradient = jax.grad(total)
            ways = {"eager": total, "jit": jax.jit(total), "jit, gradient": jax.jit(gradient)}
            if name != "while_loop":
                ways["gradient"] = gradient
            else:
                del ways["jit, gradient"]
            for way, run in ways.items():
                try:
                    found: Any = float(jnp.sum(jnp.abs(run(x))))
                except Exception as error:
                    found = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                made.setdefault(f"{name}, {way}", {})[who] = found
    print(json.dumps(made))


def _environment(flag: str) -> dict[str, str]:
    known = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _FLAGS}
    # The flag's own environment variable, which JAX reads when it is imported.
    own = {} if flag == NONE else {flag.upper(): {**COMING, **SINCE}[flag]}
    return {**os.environ, **known, **own}


def _ended(command: Sequence[str], flag: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env=_environment(flag),
        timeout=SECONDS,
        check=False,
    )


def programs(flag: str) -> dict[str, dict[str, Any]]:
    """What the small programs give with a flag."""
    done = _ended([MODULE, "--child"], flag)
    if done.returncode:
        return {"import": {"jax": done.stderr.strip().splitlines()[-1][:200], "halfstep": ""}}
    return json.loads(done.stdout.splitlines()[-1])


def conformance(flag: str, rows: int | None) -> dict[str, Any]:
    """How many tests of the conformance suite pass with a flag, and how the others fail."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "tests.xml"
        command = ["pytest", "tests/conformance", "-m", "not slow", "-q", f"--junitxml={out}"]
        command += ["-o", "addopts=--strict-config --strict-markers", "-p", "no:cacheprovider"]
        command += [] if rows is None else ["--rows", str(rows)]
        done = _ended(command, flag)
        if not out.exists():
            return {"passed": 0, "failed": {"all": (done.stdout + done.stderr)[-200:]}}
        cases = list(ET.parse(out).getroot().iter("testcase"))
    failed = {}
    for case in cases:
        for found in (*case.iter("failure"), *case.iter("error")):
            name = f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"
            failed[name] = " ".join((found.get("message") or "").split())[:400]
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    return {"passed": len(cases) - skipped - len(failed), "failed": failed}


def verdict(found: Mapping[str, Any], without: Mapping[str, Any]) -> str:
    """What became of one call: the same, or how plain JAX fails as well, or what is wrong.

    Args:
        found: What plain JAX and halfstep give with the flag.
        without: The same without it.
    """
    plain, ours = found["jax"], found["halfstep"]
    if _same(ours, without["halfstep"]):
        return "same"
    if isinstance(ours, str):
        if isinstance(plain, str):
            return f"plain JAX fails, too: {plain}"
        return f"refused: {ours}" if "halfstep" in ours else f"WRONG: {ours}"
    if not _same(plain, without["jax"]) and _same(ours, plain):
        return f"plain JAX gives another value, too: {plain:.4g}, not {without['jax']:.4g}"
    return f"WRONG: {ours:.4g}, not {without['halfstep']:.4g}"


def _same(one: float | str, other: float | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return False
    return abs(one - other) <= LEEWAY * max(abs(one), abs(other))


def rows(flags: Sequence[str], count: int | None, *, tests: bool) -> Iterator[dict[str, Any]]:
    """A row for each flag that the installed JAX has."""
    import jax

    jax_version = versions("jax")["jax"]
    without = programs(NONE)
    for flag in tqdm([flag for flag in flags if hasattr(jax.config, flag)], disable=None):
        calls = {name: verdict(found, without[name]) for name, found in programs(flag).items()}
        yield {
            "flag": flag,
            "value": COMING[flag],
            "jax": jax_version,
            "calls": len(calls),
            "not_same": {name: said for name, said in calls.items() if said != "same"},
            "conformance": conformance(flag, count) if tests else dict(UNTESTED),
        }


def excused(row: Mapping[str, Any]) -> bool:
    """Whether all that fails with a flag fails in plain JAX or is refused.

    A test may fail if it is about a mechanism whose calls plain JAX does not get right, such as a
    scan, or with the message with which a call fails.
    """
    said = row["not_same"]
    # Without the error's type: the message may be part of another one.
    messages = {found.partition(": ")[2].partition(": ")[2] or found for found in said.values()}
    about = {call.partition(",")[0].lower() for call in said}
    return not any(found.startswith("WRONG") for found in said.values()) and all(
        any(message[:SHARED] in found for message in messages)
        or bool(about & set(re.findall("[a-z0-9]+", f"{test} {found}".lower())))
        for test, found in row["conformance"]["failed"].items()
    )


def bars(made: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """What must hold."""
    ours = [row for row in made if row["flag"] == "jax_remat3" and row["jax"] >= "0.12"]
    return {
        "with every flag as in plain JAX, or refused": all(map(excused, made)),
        "jax_remat3 changes nothing": bool(ours) and all(_is_green(row) for row in ours),
    }


def _is_green(row: Mapping[str, Any]) -> bool:
    return not row["not_same"] and not row["conformance"]["failed"]


def _cell(row: Mapping[str, Any]) -> str:
    tests = row["conformance"]
    passed = f", {tests['passed']} tests" if tests["passed"] else ""
    count = f"{row['calls']} calls{passed}"
    if _is_green(row):
        return f"green: {count}"
    said = [text.partition(": ") for text in row["not_same"].values()]
    kinds = {kind: next(text for one, _, text in said if one == kind) for kind, *_ in said}
    shown = [f"{kind}: `{text}`" for kind, text in kinds.items()]
    if not shown:
        name, text = next(iter(tests["failed"].items()))
        shown = [f"{name}: `{text[:160]}`"]
    same = row["calls"] - len(row["not_same"])
    count = tests["passed"] + len(tests["failed"])
    of_tests = f" and {tests['passed']} of {count} tests" if count else ""
    return f"{same} of {row['calls']} calls{of_tests} as without it. {'; '.join(shown)}"


def text(result: Mapping[str, Any]) -> str:
    """The table of the support page."""
    jaxes = sorted({row["jax"] for row in result["rows"]}, reverse=True)
    lines: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        heading = {"flag": f"`{row['flag']}={row['value']}`"}
        lines.setdefault(row["flag"], heading)[row["jax"]] = _cell(row)
    shown = [{**dict.fromkeys(jaxes, "no such flag"), **line} for line in lines.values()]
    return table(shown, {"flag": "flag", **{jax: f"JAX {jax}" for jax in jaxes}})


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    add_choice(options, tuple(COMING))
    options.add_argument("--rows", type=int, help="of each test, run this many rows")
    options.add_argument("--no-tests", action="store_true", help="without the conformance suite")
    options.add_argument("--child", action="store_true", help="call the programs: for itself")
    given = options.parse_args(argv)
    if given.child:
        _child()
        return 0
    earlier = earlier_report(options, given)
    made = list(rows(given.only or tuple(COMING), given.rows, tests=not given.no_tests))
    done = {(row["flag"], row["jax"]) for row in made}
    kept = [
        row for row in (earlier or {"rows": []})["rows"] if (row["flag"], row["jax"]) not in done
    ]
    every = sorted([*kept, *made], key=lambda row: (list(COMING).index(row["flag"]), row["jax"]))
    result = {"rows": every, "bars": bars(every)}
    print(text(result))
    write(report(MODULE, result, packages=()), given.json)
    return 0 if all(result["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
