"""A memory budget in, a policy out: selected by a model, compiled for real, measured on arrays."""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep._autocast import collected_plans
from halfstep._policy import StoreOutcome
from halfstep._preflight.planning.addresses import Addresses
from halfstep._preflight.planning.budget import parse_budget
from halfstep._preflight.planning.candidates import Tape, tape
from halfstep._preflight.planning.choices import choices
from halfstep._preflight.planning.gradients import gradients, relative_error
from halfstep._preflight.planning.planner import plan
from halfstep._preflight.planning.selection import Problem, select, selection
from halfstep._preflight.target.accelerators import ACCELERATORS
from tests.preflight._compilers import need

MIB = 2**20
LAYERS, WIDTH, HIDDEN, ROWS = 8, 256, 1024, 8192
H100 = ACCELERATORS["h100"]


def dense(w: Any, x: Any) -> Any:
    return x @ w


def layer(x: Any, weights: Any) -> Any:
    hidden = jnp.tanh(dense(weights["up"], x))
    return x + jnp.tanh(dense(weights["down"], hidden)), None


def scanned(params: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def remat(params: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)


def written_out(params: Any, x: Any) -> Any:
    for number in range(len(params["up"])):
        x, _ = layer(x, jax.tree.map(lambda leaf, number=number: leaf[number], params))
    return jnp.mean(x**2)


def scoped(params: Any, x: Any) -> Any:
    for number in range(LAYERS):
        with jax.named_scope(f"layer_{number}"):
            x, _ = layer(x, jax.tree.map(lambda leaf, number=number: leaf[number], params))
    return jnp.mean(x**2)


def make_step(loss: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    def of_policy(policy: Any) -> Callable[..., Any]:
        def step(params: Any, x: Any) -> Any:
            grads = jax.grad(halfstep.autocast(loss, policy))(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        return step

    return of_policy


def shapes(rows: int = ROWS) -> tuple[Any, Any]:
    params = {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
    }
    return params, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


def arrays(seed: int) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "up": 0.05 * jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)),
        "down": 0.05 * jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)),
    }
    return params, jax.random.normal(keys[2], (32, WIDTH))


def taped(loss: Callable[..., Any], rules: str = "", *, layers: int = LAYERS) -> Tape:
    with collected_plans() as found:
        params, x = shapes()
        params = {
            name: jax.ShapeDtypeStruct((layers, *leaf.shape[1:]), leaf.dtype)
            for name, leaf in params.items()
        }
        jax.eval_shape(make_step(loss)(f"bf16,{rules}store:op:*=recompute"), params, x)
    return tape(found, H100)


MODELS = [scanned, remat, written_out, scoped]


@pytest.mark.parametrize("loss", MODELS, ids=lambda loss: loss.__name__)
def test_what_is_selected_is_what_is_stored(loss: Callable[..., Any]):
    """The model's bytes are those of `explain`, which reads them off the derivative."""
    offered = choices(taped(loss), H100, lossy=("e4m3",))
    for memory in (math.inf, 70 * MIB, 0.0):
        found = select(offered.problem, memory=memory) or select(offered.problem, smallest=True)
        assert found is not None
        policy = offered.policy(halfstep.Policy(), found)
        report = halfstep.explain(loss, policy)(*shapes())
        kept = sum(row.bytes for row in report.residuals if row.by)
        # Of what is written out, the last layer's sum is in float32 for the loss, too.
        more = 0 if loss in (scanned, remat) else 2 * ROWS * WIDTH * 4
        assert found.bytes <= kept <= found.bytes + more


def test_rules_tell_calls_of_a_helper_apart():
    found = Addresses(taped(scanned).places).groups
    lines = [group.rule.line for group in found]
    first = layer.__code__.co_firstlineno
    assert lines == [f"test_plan.py:{first + 1}", f"test_plan.py:{first + 2}"]


@pytest.mark.parametrize("outcome", ["keep", "recompute", "e4m3"])
def test_what_the_user_has_decided_is_no_choice(outcome: str):
    first = f"test_plan.py:{layer.__code__.co_firstlineno + 1}"
    base = halfstep.Policy.parse(f"bf16,store:line:{first}={outcome}")
    offered = choices(taped(scanned, f"store:line:{first}={outcome},"), H100)
    # The other product is the only one that is left.
    (group,) = offered.groups
    assert str(group.with_outcome("keep")) == "store:op:dot_general=keep"
    found = select(offered.problem)
    assert found is not None
    # What the user recomputes is recomputed, whatever is selected.
    assert bool(found.flops) == (outcome == "recompute")
    report = halfstep.explain(scanned, offered.policy(base, found))(*shapes())
    decided = {row.decision for row in report.residuals if row.by.startswith(f"store:line:{first}")}
    assert outcome in decided


def test_rules_tell_scopes_apart():
    places = taped(scoped).places
    found = Addresses(places).groups
    dear = [group for group in found if places[min(group.places)].is_dear]
    assert len(dear) == 2 * LAYERS
    assert {group.rule.scope for group in dear} == {f"layer_{number}" for number in range(LAYERS)}


def test_layers_that_are_written_out_are_told_apart_by_numbers():
    places = taped(written_out).places
    addresses = Addresses(places)
    found, collected = addresses.groups, addresses.families
    assert all(len(group.places) == 1 for group in found)
    dear = [x for x in collected if places[min(found[x.groups[0]].places)].is_dear]
    assert [len(family.groups) for family in dear] == [LAYERS, LAYERS]
    assert all(family.is_whole for family in dear)
    (anchors,) = [x for x in collected if x not in dear]
    assert anchors.rule.op == "add"
    # Between layers, and not where it is not worth it, such as after the last one.
    assert LAYERS // 2 <= len(anchors.groups) < LAYERS
    numbers = [found[number].rule.number for number in dear[0].groups]
    assert numbers == list(range(LAYERS))


def test_one_rule_for_all_layers_where_they_are_alike():
    offered = choices(taped(written_out), H100)
    every: dict[int, StoreOutcome] = dict.fromkeys(range(len(offered.groups)), "keep")
    whole = offered.with_outcomes(halfstep.Policy(), every).stores
    assert len([rule for rule in whole if rule.number is None]) >= 2
    assert len(whole) < len(every)
    apart = offered.with_outcomes(halfstep.Policy(), {**every, 0: "recompute"}).stores
    assert len(apart) > len(whole)
    assert str(apart[0]).endswith("#0=recompute")


def brute_force(problem: Problem, memory: float) -> float:
    """The least time of all selections, one by one."""
    best = math.inf
    free = [number for number in range(len(problem.groups)) if number not in problem.required]
    for chosen in itertools.product([False, True], repeat=len(free)):
        on = {*problem.required, *itertools.compress(free, chosen)}
        found = selection(problem, {number: problem.groups[number][0] for number in on})
        if found.bytes <= memory:
            best = min(best, found.seconds)
    return best


@pytest.mark.parametrize("loss", [scanned, written_out], ids=lambda loss: loss.__name__)
def test_what_is_selected_is_the_best_of_all(loss: Callable[..., Any]):
    problem = choices(taped(loss, layers=3), H100).problem
    kept = tuple(tuple(form for form in forms if form.name == "keep") for forms in problem.groups)
    problem = dataclasses.replace(problem, groups=kept)
    least, most = select(problem, smallest=True), select(problem)
    assert least is not None
    assert most is not None
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        memory = least.bytes + share * (most.bytes - least.bytes)
        found = select(problem, memory=memory, gap=0.0)
        assert found is not None
        assert found.seconds == pytest.approx(brute_force(problem, memory), rel=1e-6)


def test_products_of_groups_cost_what_the_compiler_makes_of_them():
    """On a GPU, each row meets the matrices of all groups; TPUs have a kernel."""
    need("cuda")
    experts, rows = 4, 1024

    def loss(params: Any, x: Any) -> Any:
        sizes = jnp.full(experts, rows // experts, jnp.int32)
        return jnp.mean(jnp.tanh(jax.lax.ragged_dot(x, params, sizes)))

    args = (
        jax.ShapeDtypeStruct((experts, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32),
    )
    with collected_plans() as plans:
        jax.eval_shape(make_step(loss)("bf16,store:op:*=recompute"), *args)
    on_gpu, on_tpu = (
        sum(place.flops for place in tape(plans, ACCELERATORS[name]).places)
        for name in ("h100", "v5e")
    )
    found = halfstep.preflight(
        halfstep.autocast(loss, "bf16"), args, targets="h100", gemm="library", progress=False
    )["h100"].contraction_flops()
    assert found == {"bfloat16": on_gpu}
    assert on_gpu == experts * on_tpu


@pytest.mark.parametrize(
    ("loss", "target", "budget"),
    [
        (scanned, "h100", 200),
        pytest.param(written_out, "h100", 170, marks=pytest.mark.slow),
        pytest.param(remat, "h100", 220, marks=pytest.mark.slow),
        pytest.param(scoped, "h100", 200, marks=pytest.mark.slow),
        pytest.param(scanned, "v5e", 170, marks=pytest.mark.slow),
        pytest.param(written_out, "v5e", 130, marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_within_its_budget(loss: Callable[..., Any], target: str, budget: int):
    need("tpu" if target == "v5e" else "cuda")
    found = plan(
        make_step(loss),
        shapes(),
        target=target,
        budget=f"{budget}MiB",
        donate_argnums=0,
        progress=False,
    )
    assert found.peak_bytes <= found.budget_bytes == budget * MIB
    assert len(found.front) <= 12
    # More than the least, or there is nothing between.
    assert found.peak_bytes >= 0.8 * found.budget_bytes
    assert 0 < found.recomputed_flops < max(x.recomputed_flops for x in found.front)
    again = halfstep.preflight(
        make_step(loss)(found.policy),
        shapes(),
        targets=target,
        donate_argnums=0,
        gemm="auto" if target == "v5e" else "triton",
        progress=False,
    )
    assert again[target].peak_bytes == found.peak_bytes


@pytest.mark.slow
def test_over_a_mesh_it_plans_for_each_device():
    need("cuda")
    found = plan(
        make_step(scanned),
        shapes(),
        target="h100:4",
        budget="85MiB",
        donate_argnums=0,
        mesh={"data": 4},
        shardings=(jax.P(), jax.P("data")),
        progress=False,
    )
    assert found.peak_bytes <= 85 * MIB
    assert 0 < found.recomputed_flops < max(x.recomputed_flops for x in found.front)
    # Each device stores its own part.
    _, least, *_ = found.front
    assert found.peak_bytes - (least.peak_bytes or 0) < found.chosen.stored_bytes / 2


@pytest.mark.slow
def test_recomputed_flops_are_those_of_a_device_where_nothing_else_fits():
    """On a TPU, what does not fit has no program in which contractions could be counted."""
    need("tpu")
    rows = 3 * 2**20
    found = plan(
        make_step(scanned),
        shapes(rows),
        target="v5e:2x2",
        donate_argnums=0,
        mesh={"data": 4},
        shardings=(jax.P(), jax.P("data")),
        progress=False,
    )
    assert not found.front[0].fits
    forward = 2 * LAYERS * (2 * rows * WIDTH * HIDDEN) / 4
    assert 0 < found.recomputed_flops <= forward


def test_what_fits_as_it_is_stays_as_it_is():
    need("cuda")
    found = plan(make_step(scanned), shapes(1024), target="h100", progress=False)
    assert found.policy == halfstep.Policy()
    assert (found.recomputed_flops, found.offloaded_bytes) == (0, 0)
    assert len(found.front) == 1


@pytest.mark.slow
def test_the_first_maker_that_fits_is_taken():
    need("cuda")

    def twice(policy: Any) -> Callable[..., Any]:
        step = make_step(scanned)(policy)

        def with_copies(params: Any, x: Any) -> Any:
            # Which no plan can do without.
            copies = [jax.tree.map(lambda p, i=i: p + i, params) for i in range(8)]
            return step(params, x), copies

        return with_copies

    found = plan(
        {"twice": twice, "once": make_step(scanned)},
        shapes(),
        target="h100",
        budget="185MiB",
        donate_argnums=0,
        progress=False,
    )
    assert found.choice == "once"
    assert {x.choice for x in found.front} == {"twice", "once"}
    assert "once" in str(found)


@pytest.mark.slow
def test_few_bits_within_a_bound(tmp_path: pathlib.Path):
    need("cuda")
    batches = [arrays(seed) for seed in range(3)]
    common: Any = {
        # Whose memory is fast for its products: encoding beats recomputing.
        "target": "a100-80gb",
        "budget": "320MiB",
        "donate_argnums": 0,
        "progress": False,
        "batches": batches,
    }
    exact = plan(make_step(scanned), shapes(), **common)
    assert exact.gradient_error is not None
    # Recomputing changes nothing but the order of sums.
    assert exact.gradient_error < float(jnp.finfo(jnp.bfloat16).eps)
    found = plan(make_step(scanned), shapes(), max_gradient_error=0.05, **common)
    assert found.gradient_error is not None
    assert 0 < found.gradient_error <= 0.05
    assert found.recomputed_flops < exact.recomputed_flops
    assert {rule.outcome for rule in found.policy.stores} & {"e4m3", "int4"}
    path = tmp_path / "plan.toml"
    found.save(path)
    assert halfstep.Policy.load(path) == found.policy
    assert path.read_text().startswith(
        "# Planned by halfstep.plan for a100-80gb, with a budget of 320.00"
    )
    assert json.loads(found.to_json())["front"][0]["policy"] == "p=f32,c=bf16,o=f32"
    assert "the plan" in str(found)
    assert "<table" in found._repr_html_()
    found.plot(tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 10_000


@pytest.mark.slow
def test_what_cannot_be_met_is_said():
    need("cuda")
    with pytest.raises(halfstep.DoesNotFitError, match=r"no plan fits into 20\.00 MiB on h100: wi"):
        plan(make_step(scanned), shapes(), target="h100", budget="20MiB", progress=False)


def test_a_step_that_does_not_use_its_policy():
    need("cuda")
    with pytest.raises(halfstep.PreflightError, match="the step does not use the policy that make"):
        plan(
            lambda policy: lambda x: x @ x,
            (jax.ShapeDtypeStruct((4096, 4096), jnp.float32),),
            target="h100",
            budget="64MiB",
            progress=False,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"make_step": {}}, "make_step is a function of a policy, or several by name; got {}"),
        ({"compiles": 2}, "a plan takes at least 3 compiles, and at most 10,000; got compiles=2"),
        ({"max_gradient_error": 0.0}, r"max_gradient_error is a share above 0; got 0\.0"),
        ({"max_gradient_error": 0.1}, "max_gradient_error needs batches: the step's arguments wi"),
    ],
)
def test_wrong_requests(options: dict[str, Any], message: str):
    given: dict[str, Any] = {"make_step": make_step(scanned), "args": shapes(), "target": "h100"}
    with pytest.raises(halfstep.PreflightError, match=message):
        plan(**(given | options))


def test_budgets():
    assert parse_budget(None, usable=100) == 100
    assert parse_budget(0.5, usable=100) == 50
    assert parse_budget(64, usable=100) == 64
    assert parse_budget("50%", usable=100) == 50
    assert parse_budget("1.5 KiB", usable=2**20) == 1536
    assert parse_budget("1kb", usable=2**20) == 1000
    for wrong in ("much", "5 XiB", ""):
        with pytest.raises(halfstep.PreflightError, match="a budget is bytes, a share, or a text"):
            parse_budget(wrong, usable=100)
    for wrong in (0, -1, 101, "1KiB"):
        with pytest.raises(
            halfstep.PreflightError, match="a budget is more than nothing and at mo"
        ):
            parse_budget(wrong, usable=100)


def test_gradients_are_seen_without_changing_the_step():
    params, x = arrays(0)
    step = jax.jit(make_step(scanned)("bf16"), donate_argnums=0)
    before = {name: np.array(leaf) for name, leaf in params.items()}
    found = gradients(step, (params, x))
    got = [found[key][0] for key in sorted(found)]
    wanted = jax.grad(halfstep.autocast(scanned, "bf16"))(params, x)
    for ours, theirs in zip(got, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # What is donated is a copy.
    for name, leaf in params.items():
        np.testing.assert_array_equal(leaf, before[name])
    doubled = {key: [2 * value for value in values] for key, values in found.items()}
    assert relative_error(doubled, found) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="steps for two policies must have as many gradients; got"):
        relative_error({}, found)
