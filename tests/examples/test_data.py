"""The loaders, on small files of each format."""

import gzip
import io
import itertools
import pathlib
import struct
import tarfile

import numpy as np
import pytest

from examples._data import (
    FASHION_MNIST,
    Dataset,
    load_cifar100,
    load_fashion_mnist,
    read_cifar100,
    read_idx,
    shuffled_batches,
)


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_fashion(folder: pathlib.Path, *, compress: bool = True, **changes: np.ndarray) -> None:
    arrays = {
        "train-images-idx3-ubyte": np.arange(4 * 2 * 3).reshape(4, 2, 3),
        "train-labels-idx1-ubyte": np.array([9, 0, 3, 1]),
        "t10k-images-idx3-ubyte": 255 - np.arange(2 * 2 * 3).reshape(2, 2, 3),
        "t10k-labels-idx1-ubyte": np.array([5, 2]),
    }
    for name, array in {**arrays, **{k.replace("_", "-"): v for k, v in changes.items()}}.items():
        content = idx(array)
        path = folder / (f"{name}.gz" if compress else name)
        path.write_bytes(gzip.compress(content) if compress else content)


@pytest.mark.parametrize("compress", [True, False])
def test_fashion_mnist_exactly(tmp_path: pathlib.Path, compress: bool):
    write_fashion(tmp_path, compress=compress)
    data = load_fashion_mnist(tmp_path)
    assert data.classes == 10
    assert data.train_images.shape == (4, 2, 3, 1)
    assert data.train_images.dtype == np.uint8
    assert data.train_labels.dtype == np.int32
    assert data.train_images[1, :, :, 0].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert data.test_images[0, 0, :, 0].tolist() == [255, 254, 253]
    assert data.train_labels.tolist() == [9, 0, 3, 1]
    assert data.test_labels.tolist() == [5, 2]


def test_fashion_mnist_missing(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        load_fashion_mnist(tmp_path)
    write_fashion(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"no t10k-labels-idx1-ubyte\.gz in"):
        load_fashion_mnist(tmp_path)


def test_fashion_mnist_parts_that_do_not_belong_together(tmp_path: pathlib.Path):
    write_fashion(tmp_path, train_labels_idx1_ubyte=np.array([1, 2, 3]))
    with pytest.raises(ValueError, match=r"n labels; got the shapes \(4, 2, 3\) and \(3,\)"):
        load_fashion_mnist(tmp_path)
    write_fashion(tmp_path, t10k_images_idx3_ubyte=np.zeros((2, 6)))
    with pytest.raises(ValueError, match=r"got the shapes \(2, 6\) and \(2,\)"):
        load_fashion_mnist(tmp_path)
    write_fashion(tmp_path, t10k_images_idx3_ubyte=np.zeros((2, 3, 3)))
    with pytest.raises(ValueError, match=r"one size; got \(2, 3\) and \(3, 3\)"):
        load_fashion_mnist(tmp_path)
    write_fashion(tmp_path, train_labels_idx1_ubyte=np.array([9, 0, 10, 1]))
    with pytest.raises(ValueError, match="labels from 0 to 9; at 2 it holds 10"):
        load_fashion_mnist(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it begins with nothing"),
        (b"\0\0\x08", "it begins with 00 00 08"),
        (b"\0\x01\x08\x01" + b"\0\0\0\0", "it begins with 00 01 08 01"),
        (b"\0\0\x0d\x01" + b"\0\0\0\0", "it begins with 00 00 0d 01"),
        (b"\0\0\x08\x00", "it begins with 00 00 08 00"),
        (b"\0\0\x08\x03" + b"\0\0\0\x01" * 2, "3 dimensions need 16 bytes, it has 12"),
        (idx(np.zeros((2, 3)))[:-1], "6 bytes of data for the shape 2x3 in its header; it holds 5"),
        (idx(np.zeros((2, 3))) + b"\0", "for the shape 2x3 in its header; it holds 7"),
    ],
)
def test_idx_errors(tmp_path: pathlib.Path, content: bytes, message: str):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(path)


@pytest.mark.parametrize(
    "content", [b"not gzip", gzip.compress(bytes(1000), mtime=0)[:-12]], ids=["none", "truncated"]
)
def test_idx_broken_gzip(tmp_path: pathlib.Path, content: bytes):
    path = tmp_path / "file.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a complete gzip file"):
        read_idx(path)


@pytest.mark.skipif(not FASHION_MNIST.exists(), reason="dataset-fashion-mnist is not installed")
def test_fashion_mnist_itself():
    data = load_fashion_mnist()
    assert data.train_images.shape == (60000, 28, 28, 1)
    assert data.test_images.shape == (10000, 28, 28, 1)
    # The classes are balanced, as published.
    assert np.bincount(data.train_labels).tolist() == [6000] * 10
    assert np.bincount(data.test_labels).tolist() == [1000] * 10
    assert data.train_labels[:5].tolist() == [9, 0, 0, 3, 0]


def cifar(labels: list[tuple[int, int]]) -> bytes:
    """Records whose pixel at (channel, row, column) is 100 * channel + row + 2 * column."""
    channel, row, column = np.indices((3, 32, 32))
    pixels = (100 * channel + row + 2 * column) % 256
    return b"".join(bytes([c, f]) + pixels.astype(np.uint8).tobytes() for c, f in labels)


TRAIN, TEST = cifar([(0, 99), (19, 0), (3, 42)]), cifar([(7, 7)])


def archive(path: pathlib.Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def check_cifar(data: Dataset) -> None:
    assert data.classes == 100
    assert data.train_images.shape == (3, 32, 32, 3)
    assert data.train_images.dtype == np.uint8
    # Pixels are stored channel by channel and come out as the last axis.
    assert data.train_images[2, 5, 10].tolist() == [25, 125, 225]
    assert data.train_images[0, 31, 0].tolist() == [31, 131, 231]
    assert data.train_labels.tolist() == [99, 0, 42]
    assert data.train_labels.dtype == np.int32
    assert data.test_images.shape == (1, 32, 32, 3)
    assert data.test_labels.tolist() == [7]


def test_cifar100_from_a_folder_and_from_the_archive(tmp_path: pathlib.Path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(TRAIN)
    (folder / "test.bin").write_bytes(TEST)
    check_cifar(load_cifar100(folder))
    check_cifar(load_cifar100(tmp_path))
    path = tmp_path / "cifar-100-binary.tar.gz"
    names = {"train.bin": TRAIN, "test.bin": TEST, "fine_label_names.txt": b"apple\n"}
    # A file of the same name elsewhere in the archive is not the one.
    archive(
        path, {"other/train.bin": b"x"} | {f"cifar-100-binary/{k}": v for k, v in names.items()}
    )
    check_cifar(load_cifar100(path))


def test_cifar100_missing(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError, match=r"no train\.bin in .*nowhere"):
        load_cifar100(tmp_path / "nowhere")
    (tmp_path / "train.bin").write_bytes(TRAIN)
    with pytest.raises(FileNotFoundError, match=r"no test\.bin in .*cifar-100-binary\.tar\.gz"):
        load_cifar100(tmp_path)
    archive(tmp_path / "a.tar.gz", {"cifar-100-binary/test.bin": TEST})
    with pytest.raises(FileNotFoundError, match=r"no train\.bin in .*a\.tar\.gz"):
        load_cifar100(tmp_path / "a.tar.gz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its 0 bytes are 0 records and 0 bytes"),
        (TRAIN[:-1], "its 9221 bytes are 2 records and 3073 bytes"),
        (cifar([(20, 0)]), r"\(coarse labels\) must hold labels from 0 to 19; at 0 it holds 20"),
        (cifar([(1, 1), (0, 100)]), r"\(fine labels\) must hold labels from 0 to 99; at 1 .* 100"),
    ],
)
def test_cifar100_errors(content: bytes, message: str):
    with pytest.raises(ValueError, match=message):
        read_cifar100(content, "train.bin")


def test_cifar100_broken_archive(tmp_path: pathlib.Path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    path.write_bytes(b"not an archive")
    with pytest.raises(ValueError, match="not a complete tar archive"):
        load_cifar100(path)
    noise = np.random.default_rng(0).integers(256, size=50_000, dtype=np.uint8).tobytes()
    archive(path, {"cifar-100-binary/train.bin": noise})
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(ValueError, match="not a complete tar archive"):
        load_cifar100(path)


def test_batches_are_a_function_of_seed_and_step():
    labels = np.arange(10)
    images = labels[:, None] * 2

    def take(count: int, *, seed: int = 0, start: int = 0) -> list[list[int]]:
        batches = shuffled_batches(images, labels, size=3, seed=seed, start=start)
        taken = list(itertools.islice(batches, count))
        assert all((x[:, 0] == 2 * y).all() for x, y in taken)
        return [y.tolist() for _, y in taken]

    whole = take(12)
    # Three whole batches an epoch, no image twice in it, and another order in the next one.
    for n in (0, 3, 6, 9):
        assert len(set(itertools.chain(*whole[n : n + 3]))) == 9
    assert whole[:3] != whole[3:6]
    assert take(12, seed=1) != whole
    for start in range(12):
        assert take(12 - start, start=start) == whole[start:]


@pytest.mark.parametrize("size", [0, 11])
def test_batches_that_cannot_be(size: int):
    with pytest.raises(ValueError, match=f"1 to 10 images, which is all; got {size}"):
        next(shuffled_batches(np.zeros((10, 1)), np.zeros(10), size=size, seed=0))
