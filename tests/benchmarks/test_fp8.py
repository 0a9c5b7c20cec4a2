"""The benchmark of products in 8 bits: what it counts, its rows, and that its command runs."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from benchmarks import _f8_models, _f8_peers, _f8_tables, _products, fp8
from tests.models.transformers import Case
from tests.preflight._compilers import need
from tests.preflight._programs import dump

pytestmark = pytest.mark.usefixtures("standard_promotion")


# Counting.

FUSED = """
HloModule jit_step, entry_computation_layout={()->f32[]}

%body.product (a: f8e4m3fn[64,32], b: f8e5m2[32,16]) -> bf16[64,16] {
  %a = f8e4m3fn[64,32]{1,0} parameter(0)
  %b = f8e5m2[32,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%widened (a: f8e4m3fn[64,32], b: bf16[32,16]) -> bf16[64,16] {
  %a.1 = f8e4m3fn[64,32]{1,0} parameter(0)
  %b.1 = bf16[32,16]{1,0} parameter(1)
  %wide = bf16[64,32]{1,0} convert(%a.1)
  ROOT %dot.2 = bf16[64,16]{1,0} dot(%wide, %b.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f8e4m3fn[64,32], f8e5m2[32,16])) -> (s32[], f8e4m3fn[64,32], f8e5m2[32,16]) {
  %state = (s32[], f8e4m3fn[64,32]{1,0}, f8e5m2[32,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f8e4m3fn[64,32]{1,0} get-tuple-element(%state), index=1
  %w = f8e5m2[32,16]{1,0} get-tuple-element(%state), index=2
  %fusion = bf16[64,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%body.product
  ROOT %next = (s32[], f8e4m3fn[64,32]{1,0}, f8e5m2[32,16]{1,0}) tuple(%i, %x, %w)
}

%condition (state.1: (s32[], f8e4m3fn[64,32], f8e5m2[32,16])) -> pred[] {
  %state.1 = (s32[], f8e4m3fn[64,32]{1,0}, f8e5m2[32,16]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(7)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x.1: f8e4m3fn[64,32], w.1: f8e5m2[32,16], v: bf16[32,16], q: bf16[4,64,32]) -> f32[] {
  %x.1 = f8e4m3fn[64,32]{1,0} parameter(0)
  %w.1 = f8e5m2[32,16]{1,0} parameter(1)
  %v = bf16[32,16]{1,0} parameter(2)
  %q = bf16[4,64,32]{2,1,0} parameter(3)
  %zero = s32[] constant(0)
  %start = (s32[], f8e4m3fn[64,32]{1,0}, f8e5m2[32,16]{1,0}) tuple(%zero, %x.1, %w.1)
  %while = (s32[], f8e4m3fn[64,32]{1,0}, f8e5m2[32,16]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %plain = bf16[64,16]{1,0} fusion(%x.1, %v), kind=kCustom, calls=%widened
  %scores = bf16[4,64,64]{2,1,0} dot(%q, %q), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}
  %small = bf16[64,8]{1,0} parameter(4)
  %odd = bf16[16,8]{1,0} dot(%plain, %small), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT %out = f32[] constant(0)
}
"""  # noqa: E501


def test_what_is_converted_before_is_not_in_8_bits():
    found = _products.count(dump(FUSED))
    # Seven turns of the loop, what was converted, attention, and one with eight columns.
    assert (found.total, found.f8, found.eligible) == (10, 7, 8)
    assert (found.of_activations, found.odd) == (1, 1)
    assert found.f8_flops == 7 * 2 * 64 * 32 * 16
    assert found.eligible_flops == 8 * 2 * 64 * 32 * 16


def test_what_is_eligible_is_said_by_the_reference():
    mine = _products.Count(total=10, f8=0, of_activations=5, odd=0, f8_flops=0, eligible_flops=100)
    reference = _products.Count(
        total=12, f8=0, of_activations=2, odd=1, f8_flops=0, eligible_flops=400
    )
    # Three of those that look like products of activations are parts of large sums.
    assert mine.beside(reference) == {
        "f8": 0,
        "eligible": 7,
        "of_activations": 2,
        "odd": 1,
        "f8_share_of_flops": 0.0,
    }


def test_a_loop_without_an_end_is_refused():
    endless = FUSED.replace('"n":"7"', '"m":"7"').replace("constant(7)", "parameter(1)")
    with pytest.raises(ValueError, match="number of turns"):
        _products.count(dump(endless))


# Its parts, on a CPU.


def test_a_direction():
    tree = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray([4.0])}
    assert fp8.cosine(tree, tree) == 1
    turned = {"a": jnp.asarray([0.0, 3.0]), "b": jnp.asarray([4.0])}
    np.testing.assert_allclose(fp8.cosine(tree, turned), 16 / 25)


def test_bars():
    rows = [
        {"policy": "f8", "bar": 0.994, "linen": [0.993, 0.996]},
        {"policy": "bf16", "bar": None},
    ]
    assert fp8.passed(rows)
    assert not fp8.passed([*rows, {"policy": "f8-row", "bar": 0.9955, "nnx": [0.9954]}])


def test_an_error_is_a_row():
    def fail() -> Any:
        raise TypeError("no such thing\nand more")

    assert fp8.attempt(fail) == {"error": "TypeError: no such thing"}
    assert fp8.attempt(lambda: 1) == 1


def test_scales_of_flax_are_handed_on():
    def loss(params: Any, x: Any) -> Any:
        # The gradient of the state is its next value.
        return jnp.sum(params["params"] * x) + jnp.sum(params[_f8_peers.STATE] ** 2)

    params = {"params": jnp.ones(2), _f8_peers.STATE: jnp.ones(1)}
    seen: list[Any] = []

    def watched(params: Any, x: Any) -> Any:
        jax.debug.callback(lambda s: seen.append(float(s[0])), params[_f8_peers.STATE])
        return loss(params, x)

    batches = [jnp.full(2, 3.0), jnp.full(2, 5.0)]
    found = list(_f8_peers.gradients(Case(params, watched), batches))
    jax.effects_barrier()
    # Two steps before, and one for each batch.
    assert seen == [1, 2, 4, 8]
    assert [set(grads) for grads in found] == [{"params"}] * 2
    assert [float(grads["params"][0]) for grads in found] == [3, 5]


@pytest.mark.parametrize("framework", ["equinox", "nnx", "haiku"])
def test_layers_of_others_do_not_take_the_operation_of_flax(framework: str):
    peer = _f8_peers.peers()["Flax, Fp8DirectDotGeneralOp"]
    assert "error" in fp8.attempt(lambda: fp8.peer_cosine(peer, framework, None))


def test_a_library_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch):
    absent = _f8_peers.Peer("nobody_has_this", {}, {}, _f8_peers.mlp)
    monkeypatch.setattr(_f8_peers, "peers", lambda: {"absent": absent})
    rows = fp8.framework_rows((), [{"policy": "f8"}])
    assert rows == [{"library": fp8.OURS}, {"library": "absent", "absent": True}]
    lines, errors = _f8_tables.peer_lines(rows[1:], ("linen",))
    assert (lines, errors) == ([{"library": "absent", "linen": "not installed"}], "")


@pytest.mark.parametrize("policy", ["f8", "f8-delayed", "nvfp4"])
def test_arguments_of_divided_models_are_all_on_the_mesh(policy: str):
    program = _f8_models.sharded(width=32, heads=2, layers=2, vocabulary=64, length=16)
    state, *rest = program.arguments(policy)
    assert (state is None) == (policy == "f8")
    for leaf in jax.tree.leaves((state, rest)):
        assert leaf.sharding.mesh == program.mesh


# Compiled.


@pytest.mark.slow
def test_small_programs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    need("cuda")
    monkeypatch.setattr(fp8, "GEMMS", ("triton",))
    program = _f8_models.dense(width=64, hidden=128, batch=256)
    (row,) = fp8.compile_rows([(program, ("f8",))])
    assert row == {
        "model": "dense",
        "recipe": "f8",
        "gemm": "triton",
        # Two forward, of both weights, and of what is between them.
        "f8": 5,
        "eligible": 5,
        "of_activations": 0,
        "odd": 0,
        "f8_share_of_flops": 1.0,
    }


@pytest.mark.slow
def test_blocks_are_counted_as_they_are_multiplied():
    need("cuda")
    program = _f8_models.dense(width=64, hidden=128, batch=256)
    rows = fp8.compile_rows([(program, ("f8-block", "mxfp8"))])
    assert [(row["recipe"], row["f8"], row["eligible"]) for row in rows] == [
        *[("f8-block", 5, 5)] * 2,
        *[("mxfp8", 0, 5)] * 2,
    ]


def test_one_recipe_is_measured_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    def row(model: str, recipe: str, gemm: str, f8: int) -> dict[str, Any]:
        return {"model": model, "recipe": recipe, "gemm": gemm, "f8": f8}

    program = _f8_models.dense(width=64, hidden=128, batch=256)
    plan = dataclasses.replace(
        fp8.QUICK,
        policies=("bf16", "f8", "f8-block"),
        programs=lambda: [(program, ("f8", "f8-block"))],
    )
    made = fp8.report(fp8.MODULE, {}, packages=fp8.PACKAGES)
    before = {
        "command": "the whole",
        "versions": made["versions"],
        "cosines": [{"policy": name, "bar": None, "linen": [0.5]} for name in plan.policies],
        "products": [row("dense", "f8", gemm, 5) for gemm in fp8.GEMMS],
        "peer_products": ["kept"],
    }
    monkeypatch.setattr(fp8, "QUICK", plan)
    monkeypatch.setattr(
        fp8,
        "cosine_rows",
        lambda names, _: [{"policy": n, "bar": None, "linen": [1]} for n in names],
    )
    monkeypatch.setattr(
        fp8,
        "compile_rows",
        lambda jobs: [row(p.name, n, gemm, 7) for p, ns in jobs for n in ns for gemm in fp8.GEMMS],
    )
    monkeypatch.setattr(fp8, "text", str)
    path = tmp_path / "fp8.json"
    path.write_text(json.dumps(before))
    again = fp8.main(["--quick", "--only", "f8-block", "--json", str(path)])
    assert json.loads(path.read_text()) == again
    assert [line["linen"] for line in again["cosines"]] == [[0.5], [0.5], [1]]
    assert [line["f8"] for line in again["products"]] == [5, 5, 7, 7]
    assert (again["command"], again["peer_products"]) == ("the whole", ["kept"])
    path.write_text(json.dumps({**before, "versions": {"jax": "0.1"}}))
    with pytest.raises(ValueError, match="rows of other versions cannot stand next to each other"):
        fp8.main(["--quick", "--only", "f8-block", "--json", str(path)])
    with pytest.raises(SystemExit):
        fp8.main(["--quick", "--only", "f8-block"])


def test_a_refused_program_is_a_row(monkeypatch: pytest.MonkeyPatch):
    def made(step: Any, args: Any, target: str, gemm: str) -> Any:
        if gemm == "triton":
            raise halfstep.PreflightError("no tiles\nat all")
        return type("Entry", (), {"proto": dump(FUSED), "devices": 1})

    monkeypatch.setattr(fp8, "compiled", made)
    rows = fp8.compile_rows([(_f8_models.dense(), ("f8",))])
    assert rows[0]["refused"] == "PreflightError: no tiles"
    assert rows[1]["f8"] == 7
    assert _f8_tables.product_lines(rows, ("model", "recipe"))[0]["library"] == "7 of 8"


@pytest.mark.slow
def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    need("cuda")
    path = tmp_path / "fp8.json"
    made = fp8.main(["--quick", "--json", str(path)])
    assert json.loads(path.read_text())["products"] == made["products"]
    assert made["passed"]
    assert [row["f8"] for row in made["products"]] == [5, 5]
    assert "**Products.**" in capsys.readouterr().out


def check_gathers(rows: list[dict[str, Any]]) -> None:
    divided = [row for row in rows if "gathered_bytes" in row]
    assert divided
    for row in divided:
        plain, mine = row["float32_gathered_bytes"], row["gathered_bytes"]
        # Elements that are gathered, in 1, 2 or 4 bytes: as many as float32 gathers.
        elements = (
            mine["float8_e4m3fn"] + mine.get("bfloat16", 0) // 2 + mine.get("float32", 0) // 4
        )
        assert elements == plain["float32"] // 4
        # All but the activations that the embedding looks up.
        assert mine["float8_e4m3fn"] > 0.95 * elements


@pytest.mark.slow
def test_weights_are_gathered_in_8_bits():
    need("cuda")
    program = _f8_models.sharded(width=256, heads=4, layers=3, vocabulary=512, length=64)
    rows = fp8.compile_rows([(program, ("f8",))])
    check_gathers(rows)


# Shown.


def test_numbers_are_rounded_down():
    assert _f8_tables.digits([0.9995, 0.9998]) == "0.9996"
    assert _f8_tables.digits([0.99959]) == "0.9995"
