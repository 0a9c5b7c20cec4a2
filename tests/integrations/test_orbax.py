"""Checkpoints: every bit comes back, or an error says why not."""

import inspect
import pathlib
import shutil
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import halfstep
from halfstep._base.digest import digests
from halfstep.integrations._orbax._verification import read_data
from tests.integrations._bits import Places, assert_same, recipes_state, same_bits, through

pytestmark = pytest.mark.core

orbax = pytest.importorskip("halfstep.integrations.orbax")
Checkpoints, CheckpointError = orbax.Checkpoints, orbax.CheckpointError
DamagedCheckpointError = orbax.DamagedCheckpointError


# Damage.


def small_state(number: int = 0) -> dict[str, Any]:
    key = jax.random.key(number)
    return {
        "w": jax.random.normal(key, (8, 16)),
        "low": jax.random.normal(key, (33,), jnp.bfloat16),
        "scaling": halfstep.DynamicLossScaling(2.0**number),
        "key": key,
        "epoch": number,
    }


@pytest.fixture
def run_of_two(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with the steps 1 and 2."""
    with orbax.Checkpoints(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, small_state(step), Places({"at": step}))
    return tmp_path / "run"


def restored(folder: pathlib.Path, step: int | None = None, like: Any = None) -> Any:
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(small_state() if like is None else like, step)


def files_of(step: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)


def is_about_times(step: pathlib.Path, path: pathlib.Path) -> bool:
    """What Orbax writes last. Nothing is restored from it."""
    last = ("_CHECKPOINT_METADATA", "commit_success.txt", "about/commit_success.txt")
    return str(path.relative_to(step)) in last


def flip(path: pathlib.Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(run_of_two: pathlib.Path, count: int):
    step, random = run_of_two / "2", np.random.default_rng(count)
    files = [path for path in files_of(step) if not is_about_times(step, path)]
    assert {path.parent.name for path in files} >= {"about", "state", "d"}
    sizes = np.asarray([path.stat().st_size for path in files])
    # As many in small files as in large ones for a half, and any bit alike for the other.
    chosen = [files[n % len(files)] for n in range(count // 2)]
    chosen += list(random.choice(np.asarray(files), count - len(chosen), p=sizes / sizes.sum()))
    with Checkpoints(run_of_two) as checkpoints:
        checkpoints.restore(small_state(), 2)
        found = 0
        for path in chosen:
            bit = int(random.integers(8 * path.stat().st_size))
            flip(path, bit)
            with pytest.raises(DamagedCheckpointError, match=r"step 2 in .* not what was written"):
                checkpoints.restore(small_state(), 2)
            flip(path, bit)
            found += 1
    assert found == count


def test_what_orbax_writes_last_cannot_change_a_state(run_of_two: pathlib.Path):
    step, random = run_of_two / "2", np.random.default_rng(0)
    files = [path for path in files_of(step) if is_about_times(step, path)]
    for path in files:
        for _ in range(3):
            flip(path, int(random.integers(8 * path.stat().st_size)))
            assert_same(restored(run_of_two, 2)[1], small_state(2))
    assert len(files) >= 1


@pytest.mark.parametrize("bits", ["8 bits", "16 bits", "32 bits"])
def test_digests_find_what_files_cannot(
    run_of_two: pathlib.Path, monkeypatch: pytest.MonkeyPatch, bits: str
):
    """A bit that flips in memory, on the way to or from a file whose hash is right."""
    monkeypatch.setattr(orbax.Checkpoints, "_read_arrays", flipping(orbax.Checkpoints, bits))
    message = {"8 bits": "['key']", "16 bits": "['low']", "32 bits": "['w']"}[bits]
    with (
        pytest.raises(DamagedCheckpointError, match=r"no step in .* can be restored") as error,
        pytest.warns(UserWarning, match="is passed over: the bits of"),
    ):
        restored(run_of_two)
    assert f"the bits of `{message}` are not those that were written" in str(error.value)


def flipping(cls: Any, bits: str) -> Any:
    read = cls._read_arrays
    name = {"8 bits": "['key']", "16 bits": "['low']", "32 bits": "['w']"}[bits]

    def wrong(self: Any, *args: Any) -> Any:
        forms, reason = read(self, *args)
        raw = np.array(forms[name])
        raw.view(np.uint8).reshape(-1)[-1] ^= 4
        return {**forms, name: raw}, reason

    return wrong


def empty_it(step: pathlib.Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def truncate(step: pathlib.Path) -> None:
    path = max(files_of(step / "state"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])


def remove(name: str) -> Any:
    def of(step: pathlib.Path) -> None:
        path = step / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return of


def of_another_program(step: pathlib.Path) -> None:
    empty_it(step)
    (step / "weights.bin").write_bytes(b"\0" * 64)


DAMAGES = {
    "empty": (empty_it, "its folder is empty"),
    "truncated": (truncate, "`state/.*` is not what was written"),
    "array file missing": (remove("state/manifest.ocdbt"), "`state/manifest.ocdbt` is missing"),
    "arrays missing": (remove("state"), "`state/.*` is missing"),
    "manifest missing": (remove("about/manifest.json"), "`about/manifest.json` is missing"),
    "incomplete": (remove("about/files.blake3"), "it is incomplete: `about/files.blake3`"),
    "foreign": (of_another_program, "another program wrote it: there is no `about`"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_and_the_previous_step_restores(run_of_two: pathlib.Path, damage: str):
    do, message = DAMAGES[damage]
    do(run_of_two / "2")
    with Checkpoints(run_of_two) as checkpoints:
        with pytest.raises(DamagedCheckpointError, match=f"step 2 in .*{message}.*there: 1"):
            checkpoints.restore(small_state(), 2)
        data = Places({"at": 0})
        with pytest.warns(UserWarning, match=f"step 2 in .* is passed over: {message}"):
            step, state = checkpoints.restore(small_state(), data=data)
        assert step == 1
        assert data.place == {"at": 1}
        assert_same(state, small_state(1))
        # The run goes on from there, and comes to step 2 again.
        checkpoints.save(2, small_state(5))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
    assert_same(restored(run_of_two)[1], small_state(5))
    assert (run_of_two / "2.damaged-0").is_dir()


def test_all_damaged(run_of_two: pathlib.Path):
    for step in "12":
        empty_it(run_of_two / step)
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(DamagedCheckpointError, match="step 2: its folder is empty; step 1: its"),
    ):
        restored(run_of_two)


def test_no_step(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError, match="there is no step in"):
        restored(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "best").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(FileNotFoundError, match="there is no step in"):
            checkpoints.restore(small_state())
        with pytest.raises(ValueError, match="`keep` must be an integer, 1 or more; got 0"):
            Checkpoints(tmp_path, keep=0)


def test_a_step_that_is_not_there(run_of_two: pathlib.Path):
    with pytest.raises(
        DamagedCheckpointError,
        match=r"step 7 .* its folder is missing.*Leave `step` out.* there: 2, 1",
    ):
        restored(run_of_two, 7)


# What does not fit.


def changed(**changes: Any) -> dict[str, Any]:
    return {**small_state(), **changes}


MISFITS = {
    "dtype": (
        changed(w=jnp.zeros((8, 16), jnp.bfloat16)),
        r"`\['w'\]` of step 2 .* stored as float32\[8, 16\]; `like` asks for bfloat16\[8, 16\], "
        r"and nothing is cast.*Put `jax.ShapeDtypeStruct\(\(8, 16\), 'float32'\)` there",
    ),
    "shape": (changed(w=jnp.zeros((16, 8))), r"stored as float32\[8, 16\].*float32\[16, 8\]"),
    "two": (
        changed(w=jnp.zeros(3), low=jnp.zeros(4)),
        r"`\['low'\]` .* 1 more leaves differ",
    ),
    "kind of key": (
        changed(key=jax.random.key(0, impl="rbg")),
        r"`\['key'\]` .* stored as .*threefry2x32.* keys.*; `like` asks for .*rbg",
    ),
    "no key": (changed(key=jnp.zeros(2, jnp.uint32)), "asks for uint32"),
    "Python's type": (changed(epoch=0.5), "stored as a Python int; `like` asks for a Python float"),
    "more": (
        changed(extra=jnp.ones(2)),
        r"another structure: `like` has `\['extra'\]`, which the step has not. Make `like` the way",
    ),
    "less": (
        {"w": jnp.zeros((8, 16))},
        r"the step has `\['epoch'\]`, `\['key'\]`, .* which `like` has not",
    ),
    "scaling": (
        changed(scaling=halfstep.StaticLossScaling(2)),
        r"the step has `\['scaling'\].counter`, which `like` has not",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_an_error(run_of_two: pathlib.Path, misfit: str):
    like, message = MISFITS[misfit]
    # Not passed over: every step would be.
    with pytest.raises(CheckpointError, match=message) as error:
        restored(run_of_two, like=like)
    assert not isinstance(error.value, DamagedCheckpointError)


def test_types_of_nodes_are_compared(tmp_path: pathlib.Path):
    recipes = recipes_state()
    with pytest.raises(CheckpointError, match=r"types there where `\['s'\]` of `like` is a NoLoss"):
        through(tmp_path / "a", {"s": ()}, {"s": halfstep.NoLossScaling()})
    f8, other = recipes["f8-delayed"], "mxfp8"
    like = eqx.tree_at(lambda s: s, f8, f8)
    object.__setattr__(like, "recipe", halfstep.RECIPES[other])
    with pytest.raises(CheckpointError, match="is of the recipe 'f8-delayed'; `like` has 'mxfp8'"):
        through(tmp_path / "b", f8, like)


def test_names_that_collide(tmp_path: pathlib.Path):
    @jax.tree_util.register_pytree_with_keys_class
    class Same:
        def tree_flatten_with_keys(self) -> Any:
            key = jax.tree_util.GetAttrKey("x")
            return [(key, jnp.ones(2)), (key, jnp.zeros(2))], None

        @classmethod
        def tree_unflatten(cls, aux: Any, leaves: Any) -> Any:
            return cls()

    with pytest.raises(CheckpointError, match=r"two leaves of the state are both named `.x`"):
        through(tmp_path, Same(), None)


def test_options(run_of_two: pathlib.Path, tmp_path: pathlib.Path):
    with Checkpoints(tmp_path / "o", options={"seed": 1, "rate": 0.5}) as checkpoints:
        checkpoints.save(1, small_state())
    with Checkpoints(tmp_path / "o", options={"seed": 1, "rate": 0.25, "new": 2}) as checkpoints:
        message = (
            r"was written with other options: new=None \(now 2\), rate=0.5 \(now 0.25\). Resume"
        )
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(small_state())
    assert restored(tmp_path / "o")[0] == 1


# The folder.


def test_retention_and_order(tmp_path: pathlib.Path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 5, 9):
            checkpoints.save(step, small_state(step))
        checkpoints.wait()
        assert checkpoints.steps() == [9]
        with pytest.raises(CheckpointError, match="steps must grow: step 9 comes after 9"):
            checkpoints.save(9, small_state())
    # A damaged newer one counts for nothing: the good one is not deleted for it.
    (tmp_path / "12").mkdir()
    (tmp_path / "11.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.latest() == 9
        with pytest.warns(UserWarning, match="step 12 .* its folder is empty"):
            step, _ = checkpoints.restore(small_state())
        checkpoints.save(step + 1, small_state(10))
        checkpoints.wait()
        assert checkpoints.steps() == [10]
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == [".halfstep-writer", "10", "12.damaged-0"]


def test_another_run_is_not_written_over(run_of_two: pathlib.Path):
    checkpoints = Checkpoints(run_of_two)
    with pytest.raises(CheckpointError, match="holds step 2 already, from another run"):
        checkpoints.save(3, small_state())
    checkpoints.restore(small_state(), 1)
    with checkpoints, pytest.raises(CheckpointError, match="delete the steps after the one that"):
        checkpoints.save(2, small_state())


def test_an_error_of_the_user_is_what_is_seen(tmp_path: pathlib.Path):
    def fail() -> None:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints._manager.close()
            checkpoints._manager = None  # So that closing it again fails.
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fail()


# Data iterators.


def test_where_the_data_is(tmp_path: pathlib.Path):
    for number, place in enumerate([b"\0\xff", {"a": [1, np.int64(2)], "b": None}, 7]):
        with Checkpoints(tmp_path / str(number)) as checkpoints:
            checkpoints.save(1, small_state(), Places(place))
            checkpoints.wait()
            data = Places(None)
            checkpoints.restore(small_state(), data=data)
            assert data.place == place
    with Checkpoints(tmp_path / "none") as checkpoints:
        checkpoints.save(2, small_state())
        checkpoints.wait()
        with pytest.raises(CheckpointError, match="without a data iterator"):
            checkpoints.restore(small_state(), data=Places(0))


def test_grain(tmp_path: pathlib.Path):
    grain = pytest.importorskip("grain")

    def make() -> Any:
        return iter(grain.MapDataset.range(20).shuffle(3).repeat().batch(4).to_iter_dataset())

    data = make()
    next(data)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small_state(), data)
        rest = [next(data).tolist() for _ in range(8)]
        resumed = make()
        checkpoints.wait()
        checkpoints.restore(small_state(), data=resumed)
    assert [next(resumed).tolist() for _ in range(8)] == rest


def test_data_of_other_numbers_of_processes(run_of_two: pathlib.Path):
    about = run_of_two / "2" / "about"
    (about / "data-0-of-1.json").rename(about / "data-0-of-2.json")
    (about / "data-1-of-2.json").write_text((about / "data-0-of-2.json").read_text())
    assert read_data(epath.Path(run_of_two / "2")) == {"dict": {"at": 2}}
    (about / "data-1-of-2.json").write_text("3")
    with pytest.raises(CheckpointError, match=r"of 2 processes .* Resume with 2, or give every"):
        read_data(epath.Path(run_of_two / "2"))


# Shardings.


def mesh_of(*shape: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(kind,) * len(shape))


def test_onto_other_meshes(tmp_path: pathlib.Path):
    whole = {"w": jax.random.normal(jax.random.key(0), (8, 12)), "key": jax.random.key(1)}
    four, square = mesh_of(4), mesh_of(2, 2)
    places = {"w": NamedSharding(four, P("a")), "key": NamedSharding(four, P())}
    state = jax.device_put(whole, places)
    shapes = {
        "w": jax.ShapeDtypeStruct(
            (8, 12), jnp.float32, sharding=NamedSharding(square, P("b", "a"))
        ),
        "key": jax.ShapeDtypeStruct((), whole["key"].dtype, sharding=NamedSharding(square, P())),
    }
    got = through(tmp_path, state, shapes)
    assert got["w"].sharding.is_equivalent_to(shapes["w"].sharding, 2)
    assert_same(jax.device_get(got["w"]), jax.device_get(whole["w"]))
    assert same_bits(got["key"], whole["key"])
    # What is not placed comes back not placed, so that it goes with anything.
    _, free = restored(tmp_path, like=whole)
    assert not free["w"].committed
    assert not free["key"].committed
    _, unplaced = restored(tmp_path, like=jax.eval_shape(lambda: whole))
    assert same_bits(unplaced["w"], whole["w"])


NUMBERS = [
    "float32",
    "bfloat16",
    "float8_e4m3fn",
    "int4",
    "float4_e2m1fn",
    "int8",
    "bool",
    "uint16",
]


@pytest.mark.rows(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_digests_do_not_depend_on_shardings(monkeypatch: pytest.MonkeyPatch, kind: AxisType):
    monkeypatch.setattr("halfstep._base.digest._SMALL", -1)
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.normal(0, 9, (4, 8))).astype(dtype) for dtype in NUMBERS]
    arrays.append(jnp.asarray(random.normal(size=(4, 8)) + 1j, jnp.complex64))
    mesh = mesh_of(2, 2, kind=kind)
    expected = digests([np.asarray(array) for array in arrays])
    assert len(set(expected)) == len(arrays)
    for spec in (P("b", "a"), P(None, ("a", "b"))):
        placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array in arrays]
        assert digests(placed) == expected
    assert digests(arrays) == expected
    with jax.enable_x64(True):
        wide = [jnp.arange(6.0, dtype=dtype) for dtype in ("float64", "int64", "complex128")]
        assert digests(wide) == digests([np.asarray(array) for array in wide])


def test_every_bit_and_every_place_counts():
    array = np.random.default_rng(0).normal(size=64).astype(np.float32)
    (first,) = digests([array])
    seen = {first}
    for bit in range(array.size * 32):
        raw = array.copy()
        raw.view(np.uint32)[bit // 32] ^= np.uint32(1 << bit % 32)
        seen.update(digests([raw]))
    for shift in range(1, 64):
        seen.update(digests([np.roll(array, shift)]))
    assert len(seen) == 1 + 64 * 32 + 63
    assert digests([np.zeros(3, np.float32)]) != digests([-np.zeros(3, np.float32)])


def test_donated_after_the_save(tmp_path: pathlib.Path):
    """The state may be donated as soon as `save` returns."""
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    value = jnp.zeros((512, 1024))
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step in range(1, 4):
            checkpoints.save(step, value)
            value = bump(value)
        checkpoints.wait()
        for step in range(1, 4):
            _, saved = checkpoints.restore(jax.ShapeDtypeStruct(value.shape, value.dtype), step)
            assert np.all(np.asarray(saved) == step - 1)


def test_nothing_is_said_when_all_is_well(run_of_two: pathlib.Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(run_of_two)[0] == 2


def test_the_step_is_a_number(tmp_path):
    with orbax.Checkpoints(tmp_path / "run") as checkpoints:
        # As without the type checker of the tests.
        save = inspect.unwrap(orbax.Checkpoints.save)
        with pytest.raises(TypeError, match=r"`step` must be an integer; got dict. Write save"):
            save(checkpoints, {"w": jnp.ones(3)}, 6)
        save(checkpoints, np.int64(3), {"w": jnp.ones(3)})
        checkpoints.wait()
        assert checkpoints.latest() == 3
