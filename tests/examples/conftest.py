"""Images that are learned in a few steps."""

import gzip
import pathlib
import struct

import numpy as np
import pytest


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Fashion-MNIST's four files, with 8 x 8 images: a pattern for each class, and noise."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    patterns = random.integers(256, size=(10, 8, 8))
    for part, count in (("train", 320), ("t10k", 100)):
        labels = np.arange(count) % 10
        images = patterns[labels] + random.normal(0, 20, (count, 8, 8))
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            content = header + array.clip(0, 255).astype(np.uint8).tobytes()
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
    return folder
