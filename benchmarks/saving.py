"""What saving and restoring cost, compared with Orbax alone.

    python -m benchmarks.saving --json benchmarks/results/saving.json

The same arrays, 2 GB by default, are saved and restored in turn by Orbax's `CheckpointManager` and
by `Checkpoints`, which uses it: how long `save` keeps the training loop, when everything is on the
disk, and how long `restore` takes. How much memory of the host saving takes in addition is measured
in processes of their own, because a process keeps memory that it has used once. All figures are
medians of ratios of neighboring runs. Needs `halfstep[orbax]`.
"""

import concurrent.futures
import contextlib
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from tqdm import tqdm

from benchmarks._report import parser, report, resident_bytes, table, write
from halfstep.integrations.orbax import Checkpoints

MODULE = "benchmarks.saving"
MEMORY_ROUNDS = 3
LEAF = 2**25
"""Bytes of each array."""
BARS: Mapping[str, float] = MappingProxyType(
    {"returns": 1.5, "written": 1.3, "restored": 1.5, "memory": 1.05}
)
"""The most that each figure may be, as a share of that of Orbax alone."""
SAID: Mapping[str, str] = MappingProxyType(
    {
        "returns": "`save` returns",
        "written": "everything is on the disk",
        "restored": "`restore`",
        "memory": "memory of the host while it saves",
    }
)


class Saver(Protocol):
    """What is measured."""

    def save(self, step: int, state: Any) -> None: ...
    def wait(self) -> None: ...
    def restore(self, step: int, like: Any) -> Any: ...
    def close(self) -> None: ...


class Alone:
    """Orbax, as its documentation has it."""

    def __init__(self, folder: pathlib.Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=True)
        self.manager = ocp.CheckpointManager(folder, options=options)

    def save(self, step: int, state: Any) -> None:
        """Begin to save."""
        self.manager.save(step, args=ocp.args.StandardSave(state))

    def wait(self) -> None:
        """Until everything is on the disk."""
        self.manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> Any:
        """The arrays of a step."""
        return self.manager.restore(step, args=ocp.args.StandardRestore(like))

    def close(self) -> None:
        """Give back threads."""
        self.manager.close()


class Ours:
    """The same with `Checkpoints`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._open = contextlib.ExitStack()
        self.checkpoints = self._open.enter_context(Checkpoints(folder, keep=1))

    def save(self, step: int, state: Any) -> None:
        """Begin to save."""
        self.checkpoints.save(step, state)

    def wait(self) -> None:
        """Until everything is on the disk."""
        self.checkpoints.wait()

    def restore(self, step: int, like: Any) -> Any:
        """The arrays of a step."""
        return self.checkpoints.restore(like, step)[1]

    def close(self) -> None:
        """Give back threads and the lock."""
        self._open.close()


class Run(NamedTuple):
    """Seconds of each part."""

    returns: float
    written: float
    restored: float


class Memory:
    """The most memory that this process has while a block runs, more than before."""

    def __init__(self) -> None:
        self.most = 0
        self._over = threading.Event()

    def __enter__(self) -> "Memory":
        self._before = resident_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, resident_bytes() - self._before)


def measured(saver: Saver, step: int, state: Any) -> Run:
    """One step, saved and restored."""
    start = time.perf_counter()
    saver.save(step, state)
    returns = time.perf_counter() - start
    saver.wait()
    written = time.perf_counter() - start
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    start = time.perf_counter()
    restored = jax.block_until_ready(saver.restore(step, like))
    seconds = time.perf_counter() - start
    if not all(map(bool, jax.tree.leaves(jax.tree.map(jnp.array_equal, restored, state)))):
        raise AssertionError(f"{type(saver).__name__} restored another state than it saved")
    return Run(returns, written, seconds)


MAKERS: tuple[Callable[[pathlib.Path], Saver], ...] = (Alone, Ours)


def state_of(size: int) -> dict[str, jax.Array]:
    """Arrays of so many bytes."""
    key = jax.random.key(0)
    return {
        f"w{n}": jax.random.normal(jax.random.fold_in(key, n), (LEAF // 4,))
        for n in range(max(size // LEAF, 1))
    }


def memory_of(place: int, size: int) -> int:
    """The memory that saving takes in addition to the state, in a process that did nothing else."""
    state = jax.block_until_ready(state_of(size))
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(MAKERS[place](pathlib.Path(folder, "run"))) as saver,
        Memory() as memory,
    ):
        for step in range(2):
            saver.save(step, state)
            saver.wait()
    return memory.most


def memories(size: int, rounds: int) -> list[tuple[int, int]]:
    """The memory of Orbax alone and of `Checkpoints`, one after the other."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        return [
            (pool.submit(memory_of, 0, size).result(), pool.submit(memory_of, 1, size).result())
            for _ in tqdm(range(rounds), unit="round", desc="memory")
        ]


def pairs(size: int, rounds: int) -> Iterator[tuple[Run, Run]]:
    """Orbax alone and `Checkpoints`, one after the other, after a round that is not counted."""
    state = state_of(size)
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x * jnp.float32(1.001), tree))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        savers = [
            opened.enter_context(contextlib.closing(make(pathlib.Path(folder, make.__name__))))
            for make in MAKERS
        ]
        for step in tqdm(range(rounds + 1), unit="round"):
            state = jax.block_until_ready(advance(state))
            # In turn the first: the second finds a disk that is busy.
            order = (0, 1) if step % 2 else (1, 0)
            made = {place: measured(savers[place], step, state) for place in order}
            if step:
                yield made[0], made[1]


def ratios(
    made: Sequence[tuple[Run, Run]], memory: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """A row for each figure."""
    rows = []
    for name, most in BARS.items():
        if name == "memory":
            found = list(memory)
        else:
            found = [(getattr(alone, name), getattr(ours, name)) for alone, ours in made]
        rows.append(
            {
                "what": name,
                "alone": statistics.median(alone for alone, _ in found),
                "ours": statistics.median(ours for _, ours in found),
                "ratio": statistics.median(ours / alone for alone, ours in found),
                "most": most,
            }
        )
    return rows


def text(result: Mapping[str, Any]) -> str:
    """The table."""
    lines = [
        {
            "what": SAID[row["what"]],
            "ratio": f"{row['ratio']:.2f}",
            "most": f"{row['most']:g}",
            "held": "yes" if row["ratio"] <= row["most"] else "**no**",
        }
        for row in result["rows"]
    ]
    columns = {"what": "", "ratio": "of Orbax alone", "most": "bar", "held": "held"}
    return (
        f"{result['bytes'] / 1e9:.1f} GB, medians of {result['rounds']} neighboring runs:\n\n"
        f"{table(lines, columns)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--gigabytes", type=float, default=2.0)
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args(argv)
    size = int(given.gigabytes * 1e9)
    rows = ratios(list(pairs(size, given.rounds)), memories(size, MEMORY_ROUNDS))
    bars = {SAID[row["what"]]: row["ratio"] <= row["most"] for row in rows}
    results = {"bytes": size, "rounds": given.rounds, "rows": rows, "bars": bars}
    made = report(MODULE, results, packages=("orbax-checkpoint",))
    print(text(made))
    write(made, given.json)
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
