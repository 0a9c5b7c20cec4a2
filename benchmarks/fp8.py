"""Products in 8 bits, and what they cost: `python -m benchmarks.fp8 --json`.

The direction of the gradient compared with float32's, for each recipe and framework, computed on a
CPU with the same formula as on an accelerator. How many products are in 8 bits in the programs that
XLA's own compiler makes for an H100. And the same of other libraries, where they are installed.
Needs `halfstep[cuda-preflight]`. Nothing is timed.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# Before JAX is imported: the GPU plugin would otherwise look for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import halfstep
from benchmarks import _f8_models, _f8_peers
from benchmarks._f8_models import Program
from benchmarks._f8_tables import text
from benchmarks._products import Count, count
from benchmarks._report import parser, report, write
from halfstep import RECIPES
from tests.models import transformers as _transformers
from tests.models.transformers import CASES, Case

MODULE = "benchmarks.fp8"
PACKAGES = ("flax", "dm-haiku", "qwix", "jax-cuda12-plugin")
GEMMS = ("triton", "library")
POLICIES = ("bf16", *RECIPES)
BARS = {
    **dict.fromkeys(("f8", "f8-delayed"), 0.994),
    **dict.fromkeys(("f8-e4m3", "f8-row", "f8-row-gw", "f8-block", "mxfp8"), 0.9955),
}
OURS = "halfstep, f8"
SEED = 3
BATCHES = 4
Row = dict[str, Any]


# The gradient's direction.


def flat(tree: Any) -> np.ndarray:
    """All leaves one after the other."""
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def cosine(first: Any, second: Any) -> float:
    """Of the angle between two trees."""
    a, b = flat(first), flat(second)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def batches() -> list[Any]:
    """Of one batch a cosine says little more than the third digit."""
    return [_transformers.data(number) for number in range(BATCHES)]


def gradients(case: Case, policy: str) -> list[Any]:
    """The gradients of all batches with a policy; scales are of the first one if they are old."""
    given, recipe, scaling = batches(), RECIPES.get(policy), None
    if recipe is not None and recipe.needs_state:
        options = {"key": jax.random.key(SEED)} if recipe.is_random else {}
        scaling = recipe.init(case.loss, case.params, given[0], **options)

    @jax.jit
    def step(scaling: Any, params: Any, data: Any) -> Any:
        made = halfstep.filter_grad(case.loss, scaling, policy=policy)(params, data)
        return made[-1] if isinstance(made, tuple) else made

    return [step(scaling, case.params, data) for data in given]


def exact(case: Case) -> list[Any]:
    """The gradients in float32."""
    func = jax.jit(jax.grad(case.loss))
    return [func(case.params, data) for data in batches()]


def cosines(made: Iterable[Any], reference: Sequence[Any]) -> list[float]:
    """Of each batch."""
    return [round(cosine(a, b), 6) for a, b in zip(made, reference, strict=True)]


def cosine_rows(policies: Sequence[str], frameworks: Sequence[str]) -> list[Row]:
    """One row for each policy, with the cosines of all batches for each framework."""
    rows: dict[str, Row] = {name: {"policy": name, "bar": BARS.get(name)} for name in policies}
    bar = tqdm(total=len(policies) * len(frameworks), desc="gradients", unit="gradient")
    for framework in frameworks:
        case = CASES[framework]()
        reference = exact(case)
        for name in policies:
            bar.set_postfix_str(f"{framework}, {name}")
            rows[name][framework] = cosines(gradients(case, name), reference)
            bar.update()
    bar.close()
    return list(rows.values())


# Compiled for an H100.


def compiled(step: Any, args: tuple[Any, ...], target: str, gemm: Any) -> Any:
    """What the compiler made of a step."""
    report = halfstep.preflight(step, args, targets=target, gemm=gemm, progress=False)
    return report.entries[0]


def said(error: Exception) -> str:
    """The kind of an error, and its first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def compile_rows(jobs: Sequence[tuple[Program, Sequence[str]]]) -> list[Row]:
    """One row for each model, recipe and maker of products."""
    rows: list[Row] = []
    total = sum(len(GEMMS) * len(policies) for _, policies in jobs)
    bar = tqdm(total=total, desc="compile", unit="program")
    for program, policies in jobs:
        plain = compiled(program.step("f32"), program.arguments("f32"), program.target, "library")
        reference = count(plain.proto)
        for policy in policies:
            for gemm in GEMMS:
                bar.set_postfix_str(f"{program.name}, {policy}, {gemm}")
                row: Row = {"model": program.name, "recipe": policy, "gemm": gemm}
                args = program.arguments(policy)
                try:
                    entry = compiled(program.step(policy), args, program.target, gemm)
                except halfstep.PreflightError as error:
                    rows.append({**row, "refused": said(error)})
                else:
                    rows.append({**row, **facts(entry, reference)})
                    if program.mesh is not None:
                        rows[-1]["float32_gathered_bytes"] = gathered(plain)
                bar.update()
    bar.close()
    return rows


def facts(entry: Any, reference: Count) -> Row:
    """Of a program: its products, and what it gathers."""
    found: Row = count(entry.proto).beside(reference)
    found["f8_share_of_flops"] = round(found["f8_share_of_flops"], 6)
    if entry.devices > 1:
        found["gathered_bytes"] = gathered(entry)
    return found


def gathered(entry: Any) -> dict[str, int]:
    """Bytes of all-gathers by dtype, for one device."""
    return {c.dtype: c.bytes for c in entry.collectives or () if c.kind == "all-gather"}


# Other libraries.


def attempt(make: Callable[[], Any]) -> Any:
    """What a function returns, or what it says when it fails."""
    try:
        with _f8_peers.quiet():
            return make()
    except Exception as error:
        return {"error": said(error)}


def framework_rows(frameworks: Sequence[str], ours: Sequence[Row]) -> list[Row]:
    """One row for each library: the cosine for each framework, or the error."""
    mine = next(row for row in ours if row["policy"] == "f8")
    rows: list[Row] = [{"library": OURS, **{name: mine[name] for name in frameworks}}]
    references = {name: exact(CASES[name]()) for name in frameworks}
    for name, peer in tqdm(_f8_peers.peers().items(), desc="peers", unit="library"):
        if _f8_peers.is_absent(peer):
            rows.append({"library": name, "absent": True})
            continue
        row: Row = {"library": name}
        for framework in frameworks:
            row[framework] = attempt(lambda f=framework, p=peer: peer_cosine(p, f, references[f]))
        rows.append(row)
    return rows


def peer_cosine(peer: _f8_peers.Peer, framework: str, reference: Any) -> Any:
    """The cosines of a library's gradients; for a framework that it does not know, a layer."""
    if framework not in peer.transformers:
        peer.trials[framework]()
        return "a single layer"
    case = peer.transformers[framework]()
    return cosines(_f8_peers.gradients(case, batches()), reference)


def peer_rows(sizes: tuple[int, int, int], *, transformer: bool) -> list[Row]:
    """Products of Linen's models, with each library."""
    width, hidden, batch = sizes
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    found = {
        name: peer for name, peer in _f8_peers.peers().items() if not _f8_peers.is_absent(peer)
    }
    rows = linen_rows(
        "Linen MLP",
        _f8_peers.mlp(width, hidden),
        x,
        {name: lambda peer=peer: peer.mlp(width, hidden) for name, peer in found.items()},
    )
    if transformer:
        makers = {name: peer.transformers["linen"] for name, peer in found.items()}
        ids = jax.eval_shape(_transformers.data)
        rows += linen_rows("Linen transformer", CASES["linen"](), ids, makers)
    return rows


def linen_rows(
    model: str, base: Case, batch: Any, makers: Mapping[str, Callable[[], Case]]
) -> list[Row]:
    """Products of one model, with each library and maker of products."""

    def made(case: Case, gemm: str) -> Any:
        grad = jax.grad(case.loss)
        return compiled(lambda p, x: grad(p, x), (case.params, batch), "h100", gemm)

    reference = count(made(base, "library").proto)
    ours = Case(base.params, halfstep.autocast(base.loss, "f8"))
    every: dict[str, Callable[[], Case]] = {OURS: lambda: ours, **makers}
    rows: list[Row] = []
    for name, make in tqdm(every.items(), desc=model, unit="library"):
        for gemm in GEMMS:
            row = attempt(lambda make=make, gemm=gemm: facts(made(make(), gemm), reference))
            rows.append({"library": name, "model": model, "gemm": gemm, **row})
    return rows


# The whole.


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured."""

    policies: tuple[str, ...]
    frameworks: tuple[str, ...]
    programs: Callable[[], Sequence[tuple[Program, Sequence[str]]]]
    peer_mlp: tuple[int, int, int]
    """Width, hidden width and rows."""
    peer_transformer: bool = True


def _programs() -> Sequence[tuple[Program, Sequence[str]]]:
    some = ("f8", "f8-delayed")
    # Blocks are decoded where a compiler divides the program.
    return [
        (_f8_models.dense(), tuple(RECIPES)),
        (_f8_models.scanned(), (*some, "f8-block")),
        (_f8_models.sharded(), some),
        (_f8_models.images(), (*some, "f8-block")),
    ]


FULL = Plan(POLICIES, tuple(CASES), _programs, (1024, 4096, 4096))
QUICK = Plan(
    ("bf16", "f8"),
    ("linen",),
    lambda: [(_f8_models.dense(width=64, hidden=128, batch=256), ("f8",))],
    (64, 128, 256),
    peer_transformer=False,
)


def measure(plan: Plan) -> dict[str, Any]:
    """All rows, with what is needed to make them again."""
    policies, frameworks, jobs = plan.policies, plan.frameworks, plan.programs()
    found = cosine_rows(policies, frameworks)
    results = {
        "transformer": {
            name.lower(): getattr(_transformers, name)
            for name in ("LAYERS", "WIDTH", "HEADS", "TOKENS", "VOCABULARY", "BATCH")
        },
        "frameworks": list(frameworks),
        "batches": BATCHES,
        "cosines": found,
        "passed": passed(found),
        "models": {program.name: program.about for program, _ in jobs},
        "products": compile_rows(jobs),
        "peer_mlp": dict(zip(("width", "hidden", "batch"), plan.peer_mlp, strict=True)),
        "peer_cosines": framework_rows(frameworks, found),
        "peer_products": peer_rows(plan.peer_mlp, transformer=plan.peer_transformer),
    }
    return report(MODULE, results, packages=PACKAGES)


def again(before: Mapping[str, Any], plan: Plan, recipes: Sequence[str]) -> dict[str, Any]:
    """The rows of some recipes, measured again, among the other rows of earlier results."""
    jobs = [
        (program, [name for name in of_program if name in recipes])
        for program, of_program in plan.programs()
        if set(of_program) & set(recipes)
    ]
    cosines = {row["policy"]: row for row in before["cosines"]}
    cosines |= {row["policy"]: row for row in cosine_rows(recipes, plan.frameworks)}
    products = {_place(row): row for row in before["products"]}
    products |= {_place(row): row for row in compile_rows(jobs)}
    # Earlier results may not have all of these rows.
    order = [
        (program.name, recipe, gemm)
        for program, of_program in plan.programs()
        for recipe in of_program
        for gemm in GEMMS
    ]
    found = [cosines[name] for name in plan.policies]
    made = {
        **before,
        "cosines": found,
        "passed": passed(found),
        "products": [products[place] for place in order],
    }
    versions = report(MODULE, {}, packages=PACKAGES)["versions"]
    if versions != before["versions"]:
        raise ValueError(
            f"rows of other versions cannot stand next to each other: {versions} here, and "
            f"{before['versions']} in the file. Leave --only out."
        )
    return made


def _place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["recipe"], row["gemm"]


def passed(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the mean of every model's cosines is at its bar or above."""
    return all(
        sum(value) / len(value) >= row["bar"]
        for row in rows
        if row["bar"] is not None
        for name, value in row.items()
        if name in CASES
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="one framework, small models")
    options.add_argument(
        "--only",
        action="append",
        choices=list(RECIPES),
        help="measure this recipe again; all else is from the file of --json",
    )
    parsed = options.parse_args(argv)
    plan = QUICK if parsed.quick else FULL
    if parsed.only:
        if parsed.json in (None, "-"):
            options.error("--only takes --json FILE, a file with earlier results")
        before = json.loads(pathlib.Path(parsed.json).read_text())
        made = again(before, plan, parsed.only)
    else:
        made = measure(plan)
    write(made, parsed.json)
    if parsed.json != "-":
        print(text(made))
    return made


if __name__ == "__main__":
    main()
