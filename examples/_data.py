"""Image data sets, read from the files they are published in. Every file is checked as it is read.

`load_fashion_mnist` reads the four idx files of Fashion-MNIST, `load_cifar100` the binary version
of CIFAR-100. Images come as `uint8[n, rows, columns, channels]`, labels as `int32[n]`.
"""

import gzip
import math
import pathlib
import struct
import tarfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

FASHION_MNIST = pathlib.Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package `dataset-fashion-mnist` puts the files."""

_IDX_UINT8 = 0x08
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 2 + math.prod(_CIFAR_SHAPE)
_CIFAR_FOLDER = "cifar-100-binary"


class Dataset(NamedTuple):
    """Images and labels to train on and to test with."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: int


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Read an idx file of bytes, compressed if its name ends in `.gz`.

    The format: two zero bytes, the type of the numbers (8 for `uint8`), the number of dimensions,
    each dimension as a big-endian 32-bit integer, and then the numbers, the last index fastest.

    Args:
        path: The file.

    Returns:
        An array of `uint8`.

    Raises:
        ValueError: If the file is not of that format, or cut short.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is not a complete gzip file ({error}). Fetch it again, or drop the `.gz` of "
            "its name if it is not compressed."
        ) from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _IDX_UINT8 or not content[3]:
        raise ValueError(
            f"{path} is not an idx file of bytes: it must begin with 00 00 08 and the number of "
            f"dimensions; it begins with {content[:4].hex(' ') or 'nothing'}."
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(
            f"{path} is cut short in its header: {content[3]} dimensions need {start} bytes, it "
            f"has {len(content)}."
        )
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} must hold {math.prod(shape)} bytes of data for the shape "
            f"{'x'.join(map(str, shape))} in its header; it holds {len(content) - start}."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _check_labels(labels: np.ndarray, classes: int, path: object) -> np.ndarray:
    if labels.size and labels.max() >= classes:
        raise ValueError(
            f"{path} must hold labels from 0 to {classes - 1}; at {int(labels.argmax())} "
            f"it holds {int(labels.max())}."
        )
    return labels.astype(np.int32)


def load_fashion_mnist(directory: pathlib.Path = FASHION_MNIST) -> Dataset:
    """Read Fashion-MNIST, or any other set of four files of the same names.

    Args:
        directory: Where the files are, with or without `.gz`.

    Raises:
        FileNotFoundError: If one is missing; the message says how to get them.
        ValueError: If one is damaged, or they do not belong together.
    """

    def find(name: str) -> pathlib.Path:
        for path in (directory / f"{name}.gz", directory / name):
            if path.exists():
                return path
        raise FileNotFoundError(
            f"there is no {name}.gz in {directory}. On Debian and Ubuntu: "
            "apt-get install dataset-fashion-mnist. Elsewhere, download the four files of "
            "https://github.com/zalandoresearch/fashion-mnist (data/fashion), and pass --data DIR."
        )

    def read(part: str) -> tuple[np.ndarray, np.ndarray]:
        path, label_path = find(f"{part}-images-idx3-ubyte"), find(f"{part}-labels-idx1-ubyte")
        images, labels = read_idx(path), read_idx(label_path)
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise ValueError(
                f"{path.name} and {label_path.name} must hold n images of two dimensions and n "
                f"labels; got the shapes {images.shape} and {labels.shape}."
            )
        return images[..., None], _check_labels(labels, 10, label_path)

    data = Dataset(*read("train"), *read("t10k"), classes=10)
    if data.train_images.shape[1:] != data.test_images.shape[1:]:
        raise ValueError(
            f"the images to train on and to test with must have one size; got "
            f"{data.train_images.shape[1:3]} and {data.test_images.shape[1:3]}."
        )
    return data


def read_cifar100(content: bytes, name: object) -> tuple[np.ndarray, np.ndarray]:
    """Decode CIFAR-100's binary format.

    A record is the coarse label, the fine label, and the 1024 red, 1024 green and 1024 blue bytes
    of an image, row by row.

    Args:
        content: The records.
        name: What to call the file in an error.

    Returns:
        Images as `uint8[n, 32, 32, 3]` and fine labels as `int32[n]`.

    Raises:
        ValueError: If that is not what it is.
    """
    if not content or len(content) % _CIFAR_RECORD:
        raise ValueError(
            f"{name} must hold whole records of {_CIFAR_RECORD} bytes; its {len(content)} bytes "
            f"are {len(content) // _CIFAR_RECORD} records and {len(content) % _CIFAR_RECORD} bytes."
            " It is cut short, or not the binary version of CIFAR-100."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _CIFAR_RECORD)
    # CIFAR-10 has no coarse label: its files read as this format give nonsense here.
    _check_labels(records[:, 0], 20, f"{name} (coarse labels)")
    labels = _check_labels(records[:, 1], 100, f"{name} (fine labels)")
    images = records[:, 2:].reshape(-1, *_CIFAR_SHAPE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels


def load_cifar100(source: pathlib.Path) -> Dataset:
    """Read the binary version of CIFAR-100 with its 100 fine labels.

    Args:
        source: The archive `cifar-100-binary.tar.gz`, the folder it unpacks to, or the folder
            that one is in.

    Raises:
        FileNotFoundError: If `train.bin` or `test.bin` is not there.
        ValueError: If a file is damaged.
    """

    def missing(name: str) -> FileNotFoundError:
        return FileNotFoundError(
            f"there is no {name} in {source}. Required: {_CIFAR_FOLDER}.tar.gz (the binary "
            "version of CIFAR-100), or the folder it unpacks to."
        )

    if not source.exists():
        raise missing("train.bin")
    files: dict[str, bytes] = {}
    if source.is_dir():
        folder = source / _CIFAR_FOLDER if (source / _CIFAR_FOLDER).is_dir() else source
        files = {path.name: path.read_bytes() for path in folder.glob("*.bin")}
    else:
        try:
            with tarfile.open(source) as archive:
                for member in archive.getmembers():
                    name = pathlib.PurePosixPath(member.name)
                    file = archive.extractfile(member) if name.suffix == ".bin" else None
                    if file is not None and name.parent.name == _CIFAR_FOLDER:
                        files[name.name] = file.read()
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{source} is not a complete tar archive ({error}).") from error
    parts: list[np.ndarray] = []
    for name in ("train.bin", "test.bin"):
        if name not in files:
            raise missing(name)
        parts += read_cifar100(files[name], f"{source}: {name}")
    return Dataset(*parts, classes=100)


def shuffled_batches(
    images: np.ndarray, labels: np.ndarray, *, size: int, seed: int, start: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches without end, in an order that is a function of the seed and the epoch alone.

    A run that resumes at step `start` therefore sees the batches of an uninterrupted run. Images
    left over at the end of an epoch are dropped.

    Args:
        images: One image an entry.
        labels: Their labels.
        size: Images in a batch.
        seed: A seed of the order.
        start: How many batches to leave out.
    """
    if not 0 < size <= len(labels):
        raise ValueError(f"a batch must have 1 to {len(labels)} images, which is all; got {size}.")
    epoch, skipped = divmod(start, len(labels) // size)
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(len(labels))
        for at in range(skipped * size, len(labels) - size + 1, size):
            yield images[order[at : at + size]], labels[order[at : at + size]]
        epoch, skipped = epoch + 1, 0
