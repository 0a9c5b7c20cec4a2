"""Text that is on every machine: Python's own library, as bytes, and batches of it by Grain."""

import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding


def python_library(size: int) -> np.ndarray:
    """The first `size` bytes of the library's sources, folder by folder."""
    parts: list[bytes] = []
    for folder, below, names in os.walk(sysconfig.get_path("stdlib")):
        left_out = {"site-packages", "test", "tests", "idle_test", "lib2to3"}
        below[:] = sorted(name for name in below if name not in left_out)
        sources = sorted(name for name in names if name.endswith(".py"))
        parts += [pathlib.Path(folder, name).read_bytes() for name in sources]
        if sum(map(len, parts)) >= size:
            break
    return np.frombuffer(b"".join(parts)[:size], np.uint8)


def digest(text: np.ndarray) -> str:
    """Eight digits that tell one text from another."""
    return hashlib.sha256(text.tobytes()).hexdigest()[:8]


class Batches:
    """Batches of windows of a text, shuffled anew in each epoch, and each process's rows of them.

    Every process has the whole order and reads its own rows only. So where the data is, is the same
    for all processes and does not depend on how many there are: a run can go on with more or fewer.

    Args:
        text: The text.
        length: How many bytes a window has.
        batch: How many windows a batch has, of all processes together.
        seed: Of the shuffling.
        sharding: How a batch is spread over devices.
    """

    def __init__(
        self, text: np.ndarray, length: int, batch: int, seed: int, sharding: NamedSharding
    ):
        self._shape, self._sharding = (batch, length), sharding
        indices = sharding.addressable_devices_indices_map(self._shape).values()
        rows = {row for index in indices if index for row in range(*index[0].indices(batch))}
        self._rows = {row: place for place, row in enumerate(sorted(rows))}
        # The last byte of a window is the first of the next: it is only a target.
        windows = np.lib.stride_tricks.sliding_window_view(text, length)[:: length - 1]
        mine = np.asarray(list(self._rows))
        places = grain.MapDataset.range(len(windows)).shuffle(seed).repeat().batch(batch)
        data = places.map(lambda numbers: windows[numbers[mine]])
        reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self.iterator = iter(data.to_iter_dataset(reading))

    def __iter__(self) -> Iterator[jax.Array]:
        return self

    def __next__(self) -> jax.Array:
        """The next batch, as one array over all processes."""
        mine = next(self.iterator)

        def shard(index: Any) -> np.ndarray:
            rows = range(*index[0].indices(self._shape[0]))
            return mine[[self._rows[row] for row in rows]]

        return jax.make_array_from_callback(self._shape, self._sharding, shard)
