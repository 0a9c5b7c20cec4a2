"""The live view: what is read when, what is kept, and how it is shown."""

import dataclasses
import functools
import inspect
import io
import json
import math
import re
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from tqdm import tqdm

import halfstep
from halfstep import debug
from halfstep._explain.entries import Typed
from halfstep._program.sources import Source
from halfstep.debug._live import (
    live as _live,
    panels as _live_panels,
    read as _live_read,
    show as _live_show,
)
from halfstep.debug._live.history import History, Part
from halfstep.debug._live.read import Sites


class FakeBar:
    def __init__(self):
        self.lines, self.drawn = [], 0

    def set_postfix_str(self, text, refresh):
        self.lines.append(text)
        self.drawn += refresh


_OP = {jnp.float16: "convert_element_type", jnp.float32: "mul"}


@functools.cache
def _recorder(compute, dtype):
    def step(w, x):
        y = (w * x).astype(dtype)
        return jnp.sum(y.astype(jnp.float32)), w

    recorder = debug.record(step, compute=compute, sites=lambda site: site.op == _OP[dtype])
    return recorder.init(jnp.ones(4), jnp.ones(4)), jax.jit(recorder)


def _recorded(scale=1.0, steps=1, compute=None, dtype=jnp.float16):
    """A log of a step of which one value is recorded: 1, 2, 3 and 4 times the scale."""
    log, run = _recorder(compute, dtype)
    w, x = jnp.asarray([1.0, 2.0, 3.0, 4.0]), jnp.full(4, scale, jnp.float32)
    for _ in range(steps):
        log, _ = run(log, w, x)
    return log


# The line.


def test_all_on_one_line():
    scaling = halfstep.DynamicLossScaling(2**15).adjust(False)
    ledger = halfstep.Ledger().record(True).record(False).record(False)
    live = debug.Live()
    live.update(3, loss=jnp.float32(2.3125), scaling=scaling, ledger=ledger, lr=1e-3, accuracy=0.5)
    live.flush()
    assert live.line == (
        "loss 2.31 | scale 2^14 | skipped 2 (2 in a row) | lr 0.001 | accuracy 0.5"
    )
    assert live.step == 3
    assert live.latest == {
        "loss": 2.3125,
        "loss_scale": 2.0**14,
        "skipped": 2.0,
        "skipped_in_a_row": 2.0,
        "lr": 1e-3,
        "accuracy": 0.5,
    }
    assert {type(value) for value in live.latest.values()} == {float}


def test_everything_is_optional():
    live = debug.Live()
    assert (live.line, live.step, live.latest) == ("", None, {})
    assert "nothing was given" in str(live)
    live.update(0)
    assert (live.line, live.step) == ("", 0)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(2.0**-3, "2^-3"), (1.0, "2^0"), (1000.0, "1000"), (math.inf, "inf"), (math.nan, "nan")],
)
def test_scales(value: float, shown: str):
    live = debug.Live()
    # Without a loss scaling of this package, numbers of those names mean the same.
    live.update(0, loss_scale=value, skipped=4)
    assert live.line == f"scale {shown} | skipped 4"


def test_no_loss_scaling_has_no_scale():
    live = debug.Live()
    live.update(0, loss=1.0, scaling=halfstep.NoLossScaling())
    recipe = halfstep.RECIPES["f8"]
    params, x = jnp.ones((32, 32)), jnp.ones((16, 32))
    scaling = recipe.init(lambda params, x: jnp.sum(x @ params), params, x)
    live.update(1, loss=1.0, scaling=scaling)
    live.flush()
    assert live.line == "loss 1"


@pytest.mark.parametrize(
    ("scale", "line"),
    [
        (1.0, "underflow 0 % | overflow 0 %"),
        # Float16's smallest normal number is 2^-14.
        (2.0**-16, "underflow 75 % (75 % at test_live.py:LINE) | overflow 0 %"),
        # Its largest is 65504; what is above becomes infinite.
        (2.0**15, "underflow 0 % | overflow 75 % (75 % at test_live.py:LINE)"),
    ],
)
def test_shares_of_a_log(scale: float, line: str):
    live = debug.Live()
    live.update(0, log=_recorded(scale))
    live.flush()
    number = _recorder.__wrapped__.__code__.co_firstlineno + 3
    assert live.line == line.replace("LINE", str(number))
    assert set(live.latest) == {"underflow", "overflow"}
    if scale != 1:
        kind = "underflow" if scale < 1 else "overflow"
        assert f"Most {kind}: 75 % of convert_element_type f16[4] at test_live.py" in str(live)
        quiet = debug.Live(name_above=0.75)
        quiet.update(0, log=_recorded(scale))
        assert " at " not in (quiet.flush() or quiet.line)


def test_a_float32_run_is_compared_with_another_dtype():
    live = debug.Live()
    live.update(0, log=_recorded(2.0**15, compute="f16", dtype=jnp.float32))
    live.flush()
    assert live.latest["overflow"] == 0.75


def test_an_empty_log_says_nothing():
    live = debug.Live()
    live.update(0, log=_recorded(steps=0))
    live.flush()
    assert live.latest == {}


def _site(stage, dtype, size):
    source = Source("train.py", size, "loss")
    made = Typed(dtype, (size,), size * (2 if dtype == "f16" else 4))
    return debug.Site("add", source, "", stage, False, (), (), made)


def test_which_sites_count():
    sites = [
        _site("forward", "f16", 30),
        _site("backward", "f16", 10),
        _site("backward", "f32", 1000),
        _site("update", "f16", 1000),
        _site("forward", "f16", 1000),
    ]
    # Each: the largest magnitude, how many are bad, the shares below and above.
    rows = np.asarray(
        [
            [1, 0, 0.1, 0],
            [np.inf, 5, 0.5, 0.1],
            [1, 0, 1, 0],
            [1, 0, 1, 0],
            [-1, 0, 0, 0],
        ]
    )
    shares = Sites(sites).shares(rows)
    assert shares is not None
    assert shares.underflow == pytest.approx((3 + 5) / 40)
    assert shares.overflow == pytest.approx((5 + 1) / 40)
    assert shares.most_underflow == (0.5, sites[1])
    assert shares.most_overflow == (0.6, sites[1])
    # Without any of 16 bits, all of the two passes count.
    shares = Sites(sites[2:4]).shares(rows[2:4])
    assert shares is not None
    assert shares.most_underflow == (1, sites[2])


def test_a_line_of_a_library_is_named_only_if_there_is_no_other():
    mine = _site("forward", "f16", 10)
    source = Source(_live.__file__, 1, "update")
    theirs = dataclasses.replace(mine, source=source)
    rows = np.asarray([[1, 0, 0.9, 0.0], [1, 0, 0.5, 0.0]])
    shares = Sites([theirs, mine]).shares(rows)
    assert shares is not None
    assert shares.most_underflow == (0.5, mine)
    shares = Sites([theirs, mine]).shares(rows * [[1], [0]])
    assert shares is not None
    assert shares.most_underflow == (0.9, theirs)


# When it is read.


@jax.jit
def _slow(turns):
    def turn(_, x):
        return jnp.sin(x + 1)

    return jax.lax.fori_loop(0, turns, turn, jnp.zeros((64, 64)))[0, 0]


def test_update_does_not_wait():
    let_go = threading.Event()

    def wait(_):
        assert let_go.wait(30)
        return np.float32(3)

    @jax.jit
    def step(x):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x)

    live, bar = debug.Live(), FakeBar()
    # Compile everything beforehand.
    let_go.set()
    live.update(0, loss=step(_slow(1)))
    live.flush()
    let_go.clear()
    try:
        live = debug.Live(bar=bar)
        # Of a number that is not there yet: else the CPU would run the step within the call.
        loss = step(_slow(8000))
        began = time.monotonic()
        assert not live.update(1, loss=loss)
        assert time.monotonic() - began < 10
        assert not loss.is_ready()
        assert (live.step, live.latest, bar.lines) == (None, {}, [])
    finally:
        let_go.set()
    live.flush()
    assert (live.step, live.latest, bar.lines) == (1, {"loss": 3}, ["loss 3"] * 2)


def test_what_was_given_may_be_donated():
    step = jax.jit(lambda scaling: scaling.adjust(True), donate_argnums=0)
    scaling, live = halfstep.DynamicLossScaling(4, period=1), debug.Live()
    for number in range(3):
        scaling = step(kept := scaling)
        assert kept.loss_scaling.is_deleted()
        live.update(number, scaling=scaling)
    assert live.to_dict()["numbers"]["loss_scale"]["last"] == [8, 16, 32]


def test_the_oldest_is_read_first_and_waited_for_when_many_wait(monkeypatch):
    class Fake(_live_read.Taken):
        def is_ready(self):
            return self.step in ready

        def read(self):
            was_read.append(self.step)
            return {"loss": float(self.step)}, None

    ready, was_read = set(), []

    monkeypatch.setattr(_live, "take", lambda step, *_: Fake(step, {}))
    monkeypatch.setattr(_live, "_WAITING", 3)
    live = debug.Live()
    assert not any(live.update(step) for step in range(3))
    ready |= {1}
    # Too many wait: the oldest is waited for, and what is ready behind it is read with it.
    assert live.update(3)
    assert was_read == [0, 1]
    ready |= {3}
    # Steps stay in order.
    assert not live.update(4)
    ready |= {2}
    assert live.update(5)
    assert was_read == [0, 1, 2, 3]
    assert (live.step, live.latest) == (3, {"loss": 3.0})


def test_every():
    live = debug.Live(every=10)
    for step in range(25):
        live.update(np.int64(step), loss=float(step))
    assert live.to_dict()["steps"] == [0, 10, 20]


def test_devices_may_differ(mesh):
    first, last = jax.devices()[0], jax.devices()[-1]
    live = debug.Live()
    live.update(
        0,
        loss=jax.device_put(jnp.float32(1), NamedSharding(mesh, PartitionSpec())),
        a=jax.device_put(jnp.bfloat16(2), last),
        b=jax.device_put(jnp.int32(2**24 + 1), first),
        c=np.float16(3),
        d=True,
    )
    live.flush()
    assert live.latest == {"loss": 1, "a": 2, "b": 2**24 + 1, "c": 3, "d": 1}


def test_what_is_no_number(mesh):
    live = debug.Live()
    with pytest.raises(ValueError, match=r"`loss` must be one real number.*got float32\[4\]"):
        live.update(0, loss=jnp.ones(4))
    for wrong in ("high", 1j, None, jax.random.key(0)):
        with pytest.raises(ValueError, match="`mine` must be one real number"):
            live.update(0, mine=wrong)
    with pytest.raises(ValueError, match=r"`loss` is traced: .* inside a compiled function"):
        jax.jit(lambda x: live.update(0, loss=x))(1.0)
    with pytest.raises(TypeError, match="`step` must be a number on the host"):
        live.update(jnp.asarray(1))
    with pytest.raises(TypeError, match=r"`scaling` must be a loss scaling.*got float"):
        live.update(0, scaling=2.0)
    scaling, ledger = halfstep.DynamicLossScaling(), halfstep.Ledger()
    with pytest.raises(ValueError, match="`loss_scale`, `skipped` is given twice"):
        live.update(0, scaling=scaling, ledger=ledger, loss_scale=1, skipped=0)
    with pytest.raises(ValueError, match="`overflow` is given twice"):
        live.update(0, log=_recorded(), overflow=1)
    gone = jnp.float32(1) + 1
    gone.delete()
    with pytest.raises(ValueError, match="`loss` was donated to a later step"):
        live.update(0, loss=gone)
    log = _recorded()
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    log = debug.Log(jax.device_put(log.rows, sharded), log.step, log.layout)
    with pytest.raises(ValueError, match=r"`log\.rows` must be the same on all.*out_shardings"):
        live.update(0, log=log)
    assert live.step is None
    with pytest.raises(ValueError, match="`every` must be an integer"):
        debug.Live(every=0)


def test_only_the_first_process_shows(monkeypatch, tmp_path, mesh):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    bar = FakeBar()
    with debug.Live(bar=bar) as live:
        assert not live.update(0, loss=1.0)
        # An error is one on all processes, or the others would wait for the first one.
        with pytest.raises(ValueError, match="`loss` must be one real number"):
            live.update(0, loss=jnp.ones(4))
        log = _recorded()
        sharded = NamedSharding(mesh, PartitionSpec("data"))
        log = debug.Log(jax.device_put(log.rows, sharded), log.step, log.layout)
        with pytest.raises(ValueError, match=r"`log\.rows` must be the same on all"):
            live.update(0, log=log)
    live.plot(tmp_path / "live.png")
    live.to_json(tmp_path / "live.json")
    assert str(live) == "only process 0 keeps the numbers"
    assert (bar.lines, live.latest, list(tmp_path.iterdir())) == ([], {}, [])


# What is kept.


def test_constant_memory():
    history = History(8)
    for step in range(1000):
        history.add(step, {"loss": float(step)})
    assert len(history) <= 8
    assert history.width == 128
    assert history.updates == 1000
    assert list(history.steps) == list(range(0, 1000, 128))
    ends = [*range(127, 1000, 128), 999]
    np.testing.assert_array_equal(history.part("loss", Part.LOW), history.steps)
    np.testing.assert_array_equal(history.part("loss", Part.HIGH), ends)
    np.testing.assert_array_equal(history.part("loss", Part.LAST), ends)
    np.testing.assert_array_equal(history.mean("loss"), (history.steps + ends) / 2)
    assert history.part("loss", Part.COUNT).sum() == 1000


def test_one_bad_number_is_not_lost():
    history = History(4)
    for step in range(64):
        numbers = {"loss": math.nan if step == 5 else 1.0}
        history.add(step, numbers | ({"late": 2.0} if step >= 33 else {}))
    assert list(history.part("loss", Part.BAD)) == [1, 0, 0, 0]
    np.testing.assert_array_equal(history.mean("loss"), 1)
    np.testing.assert_array_equal(history.mean("late"), [np.nan, np.nan, 2, 2])
    assert list(history.part("late", Part.COUNT)) == [0, 0, 15, 16]


def test_after_a_restore():
    history = History(8)
    for step in (*range(6), 3, 4):
        history.add(step, {"loss": float(step)})
    assert (list(history.steps), history.last) == ([0, 1, 2, 3, 4], 4)
    # The same step once more adds to it.
    history.add(4, {"loss": 8.0, "accuracy": 0.5})
    assert list(history.steps) == [0, 1, 2, 3, 4]
    assert history.mean("loss")[-1] == 6
    with pytest.raises(ValueError, match="`points` must be an even number"):
        History(7)


def _run(points=2048, steps=40):
    live = debug.Live(points=points)
    scaling, ledger = halfstep.DynamicLossScaling(2**10, period=5), halfstep.Ledger()
    log = _recorded(2.0**-15)
    for step in range(steps):
        finite = step % 9 != 8
        scaling, ledger = scaling.adjust(finite), ledger.record(finite)
        loss = math.nan if step == 20 else 2 / (step + 1)
        live.update(step, loss=loss, scaling=scaling, ledger=ledger, log=log, lr=1e-3)
    return live


def test_the_run_as_text_json_and_html(tmp_path):
    live = _run()
    text = live.summary()
    assert text == str(live)
    assert text.startswith("steps 0 to 39, 40 updates")
    assert re.search(r"^loss +0\.05 +0\.05 +2 +1$", text, re.MULTILINE)
    assert re.search(r"^loss scale +2\^10 +2\^10 +2\^11 +-$", text, re.MULTILINE)
    assert re.search(r"^skipped +4 +0 +4 +-$", text, re.MULTILINE)
    assert re.search(r"^underflow +25 % +25 % +25 % +-$", text, re.MULTILINE)
    read = json.loads(live.to_json(tmp_path / "live.json"))
    assert read == json.loads((tmp_path / "live.json").read_text())
    assert read["numbers"]["loss"]["last"][19:22] == [0.1, None, pytest.approx(2 / 22)]
    assert read["numbers"]["loss"]["not_finite"][20] == 1
    assert read["worst"]["underflow"]["share"] == 0.25
    assert read["latest"]["skipped"] == 4
    page = live._repr_html_()
    assert "underflow" in page
    # Red is what was not finite, and nothing else.
    assert page.count("color:#d32f2f") == 1


@pytest.mark.parametrize("points", [2048, 8])
def test_picture(points, tmp_path):
    live = _run(points)
    live.plot(tmp_path / "live.png")
    assert (tmp_path / "live.png").read_bytes().startswith(b"\x89PNG")
    panels = _live_panels.panels_of(live._history)
    shares = ("underflow", "overflow")
    assert list(panels.values()) == [("loss",), ("loss_scale",), shares, ("lr",)]
    if points == 2048:
        assert list(np.flatnonzero(_live_panels.skipped_points(live._history))) == [8, 17, 26, 35]


@pytest.mark.parametrize(
    ("numbers", "panels"),
    [
        ({"loss": math.nan}, ["loss"]),
        ({"loss": 1.0, "skipped": 2}, ["loss"]),
        ({"skipped": 2, "skipped_in_a_row": 1}, ["steps skipped"]),
        ({"loss_scale": 0.0, "accuracy": 1}, ["loss scale", "accuracy"]),
    ],
)
def test_only_panels_with_data(numbers, panels, tmp_path):
    live = debug.Live()
    live.update(0, **numbers)
    live.plot(tmp_path / "live.png")
    assert list(_live_panels.panels_of(live._history)) == panels


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw yet"):
        debug.Live().plot(tmp_path / "live.png")


def test_a_run_that_goes_on_was_not_skipped_at_its_start():
    live = debug.Live()
    for step, skipped in ((100, 7), (101, 7), (102, 8)):
        live.update(step, skipped=skipped)
    assert list(_live_panels.skipped_points(live._history)) == [False, False, True]


# How it is shown.


def test_behind_a_bar():
    file = io.StringIO()
    with tqdm(range(5), file=file) as bar, debug.Live(bar=bar) as live:
        for step in bar:
            live.update(step, loss=step)
    # The bar closes with the loop, before the live view.
    assert re.search(r"5/5.*loss 4\]\n$", file.getvalue())


def test_lines_are_not_written_faster_than_read():
    bar = FakeBar()
    began = time.monotonic()
    with debug.Live(bar=bar) as live:
        for step in range(200):
            live.update(step, loss=float(step))
    assert 1 < bar.drawn <= 3 + (time.monotonic() - began) / 0.1
    # But the bar has the newest when it draws itself.
    assert bar.lines == [f"loss {step}" for step in [*range(200), 199]]


def test_a_line_of_tqdm(capsys):
    with debug.Live(style="tqdm") as live:
        live.update(0, loss=1.5)
    assert "loss 1.5" in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_of_rich(is_terminal):
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=24)
    shown = _live_show.Rich(console)
    shown.show("loss 1", alarm=False, draw=True)
    shown.show("loss 2", alarm=False, draw=False)
    shown.show("loss nan | and so on, up to the end of the line", alarm=True, draw=True)
    shown.close()
    console.print("after")
    written = file.getvalue()
    assert "loss 2" not in written
    assert ("\x1b[1;31mloss nan | and so on, u…" in written) == is_terminal
    assert re.search(r"…(\x1b\[0m)?\n.*after\n$", written, re.DOTALL)


def test_rich_by_name(capsys):
    with debug.Live(style="rich") as live:
        live.update(0, loss=1.5)
    assert "loss 1.5" in capsys.readouterr().out


def test_an_error_is_not_hidden_by_what_never_comes(monkeypatch):
    class Never(_live_read.Taken):
        def is_ready(self):
            return False

        def read(self):
            raise AssertionError("it was waited for")

    monkeypatch.setattr(_live, "take", lambda *_: Never(0, {}))

    def train():
        with debug.Live() as live:
            live.update(0)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()


def test_styles():
    with pytest.raises(ValueError, match="leave one of them out"):
        debug.Live(style="rich", bar=FakeBar())
    with pytest.raises(TypeError, match=r"must be a tqdm bar.*got int"):
        debug.Live(bar=3)
    with pytest.raises(ValueError, match="`style` must be 'tqdm', 'rich' or None"):
        # Unwrapped: in tests beartype would object first.
        inspect.unwrap(_live_show.display)("curses", None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("package", "extra"), [("tqdm", "live"), ("rich", "live")])
def test_what_is_missing_is_said(package, extra, monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf'pip install "halfstep\[{extra}\]"'):
        debug.Live(style=package)


def test_the_picture_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    live = debug.Live()
    live.update(0, loss=1.0)
    with pytest.raises(ModuleNotFoundError, match=r'the live view needs matplotlib.*\[plot\]"'):
        live.plot(tmp_path / "live.png")
