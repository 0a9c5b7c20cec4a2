"""What a bad step was given, kept and run again."""

import json
import shutil
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import debug
from halfstep._base import seal
from halfstep.cli import main

pytest.importorskip("orbax.checkpoint")
# Orbax's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")


def _step(capture, donate=()):
    def step(state, batch, key):
        grads = jax.grad(lambda w: jnp.sum(jnp.sqrt(batch["x"] * w)))(state["w"])
        finite = halfstep.all_finite(grads)
        capture(finite, state, batch, key)
        return {**state, "w": halfstep.select_tree(finite, state["w"] - 0.1 * grads, state["w"])}

    return jax.jit(step, donate_argnums=donate)


def _batch(*x):
    return {"x": jnp.array(x), "labels": jnp.arange(2)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Five steps of which three are bad, two of them kept."""
    directory = tmp_path_factory.mktemp("captures")
    capture = debug.Capture(directory, limit=2)
    step = _step(capture, donate=(0,))
    state = {"w": jnp.ones(2), "half": jnp.array([1.5], jnp.bfloat16)}
    for number, second in enumerate([1.0, 0.0, 4.0, 0.0, 0.0]):
        state = step(state, _batch(1.0, second), jax.random.key(number))
    return capture.wait(), state


def test_bad_steps_are_kept(saved):
    paths, state = saved
    assert [path.name for path in paths] == ["0", "1"]
    like = jax.eval_shape(lambda: state), _batch(0.0, 0.0), jax.random.key(9)
    before, batch, key = debug.load_capture(paths[1], *like)
    assert batch["x"].tolist() == [1.0, 0.0]
    assert before["half"].dtype == jnp.bfloat16
    # The third bad step was not kept, the state is that of the second: skipped, as it was.
    np.testing.assert_array_equal(before["w"], state["w"])
    assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(3))).all()
    found = debug.first_nonfinite(_step(lambda *args: None), before, batch, key)
    assert found is not None
    assert (found.site.op, found.site.stage) == ("div", "backward")


def test_others_are_refused(saved, tmp_path):
    paths, state = saved
    with pytest.raises(ValueError, match=r"only the capture has \['args/2'\]"):
        debug.load_capture(paths[0], state, _batch(0.0, 0.0))
    wrong = {**state, "w": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"args/0/w must be float32\[3\].*has float32\[2\]"):
        debug.load_capture(paths[0], wrong, _batch(0.0, 0.0), jax.random.key(0))
    with pytest.raises(ValueError, match=r"is not a complete capture: files.sha256 is missing"):
        debug.load_capture(tmp_path, state)


def _files(path):
    return sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)


def test_every_flipped_bit_is_found(saved, tmp_path):
    paths, state = saved
    shutil.copytree(paths[0], tmp_path / "0")
    like = state, _batch(0.0, 0.0), jax.random.key(0)
    debug.load_capture(tmp_path / "0", *like)
    random = np.random.default_rng(0)
    files = _files(tmp_path / "0")
    assert len(files) >= 5
    for file in files * 3:
        whole = file.read_bytes()
        flipped = bytearray(whole)
        bit = int(random.integers(8 * len(whole)))
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"is damaged: .* what was written"):
            debug.load_capture(tmp_path / "0", *like)
        file.write_bytes(whole)


def _about(**changes):
    def forge(path):
        about = json.loads((path / "about.json").read_text())
        (path / "about.json").write_text(json.dumps(about | changes))

    return forge


def _written(text):
    return lambda path: (path / "about.json").write_text(text)


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (_written("{"), "`about.json` is not JSON"),
        (_written("[" * 10**6), "`about.json` is not JSON: it is nested too deep"),
        (_written("[]"), "`about.json` must have a field 'paths' of type list"),
        (_about(keys=[]), "must have a field 'keys' of type dict"),
        (_about(digests=[]), "has not as many digests as arrays"),
        (_about(keys={"args/2": "eval"}), "names keys that JAX has not"),
        (_about(keys={"args/2": 3}), "has something else where a text must be"),
        (_about(digests=["0" * 16] * 5), "the bits of args/0/half are not those"),
        (lambda path: (path / "arrays" / "_METADATA").write_text("{}"), "Orbax cannot read it"),
    ],
    ids=range(9),
)
def test_a_forgery_is_refused(saved, tmp_path, forge, message):
    paths, state = saved
    shutil.copytree(paths[0], tmp_path / "0")
    forge(tmp_path / "0")
    (tmp_path / "0" / "files.sha256").unlink()
    seal(tmp_path / "0", where=tmp_path / "0")
    with pytest.raises(ValueError, match=message):
        debug.load_capture(tmp_path / "0", state, _batch(0.0, 0.0), jax.random.key(0))


def test_a_file_that_was_added_is_found(saved, tmp_path):
    paths, state = saved
    shutil.copytree(paths[0], tmp_path / "0")
    (tmp_path / "0" / "arrays" / "more").write_text("")
    with pytest.raises(ValueError, match="`arrays/more` was added after it was written"):
        debug.load_capture(tmp_path / "0", state, _batch(0.0, 0.0), jax.random.key(0))


def test_a_later_run_keeps_the_captures_of_an_earlier_one(saved):
    paths, _ = saved
    capture = debug.Capture(paths[0].parent, limit=1)
    _step(capture)({"w": jnp.ones(2)}, _batch(1.0, 0.0), jax.random.key(0))
    (path,) = capture.wait()
    assert path not in paths


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        debug.Capture(tmp_path, limit=0)
    gradient = halfstep.filter_grad(lambda w: jnp.sum(w), policy="bf16")
    _, verdict, _ = gradient(jnp.ones(2))
    with pytest.raises(ValueError, match="ask for it with `check_finite=True`"):
        debug.Capture(tmp_path)(verdict, jnp.ones(2))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    directory = tmp_path_factory.mktemp("replay")
    (directory / "overflows.py").write_text(
        textwrap.dedent(
            """
            import halfstep
            import jax.numpy as jnp


            def loss(w, x):
                return jnp.mean((x @ w) ** 2)


            def make_step(policy):
                gradient = halfstep.filter_grad(loss, halfstep.NoLossScaling(), policy=policy)
                return lambda w, x: gradient(w, x)[2], (jnp.ones((4, 2)), jnp.ones((3, 4)))
            """
        )
    )
    capture = debug.Capture(directory / "captures")
    capture(jnp.asarray(False), jnp.full((4, 2), 600.0), jnp.full((3, 4), 600.0))
    (path,) = capture.wait()
    return f"{directory / 'overflows.py'}:make_step", str(path)


def test_the_command(script, capsys):
    name, path = script
    assert main(["replay", path, name, "--policy", "f16"]) == 1
    printed = capsys.readouterr().out
    assert "f16: an infinity in" in printed
    assert "f32: all finite" in printed
    assert main(["replay", path, name, "--policy", "bf16", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {"bf16": None, "f32": None}


def test_the_command_says_what_is_wrong(script, capsys, tmp_path):
    name, path = script
    assert main(["replay", str(tmp_path), name]) == 2
    assert "is not a complete capture" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["replay", path, name, "--policy", "f17"])
    assert "f17" in capsys.readouterr().err
