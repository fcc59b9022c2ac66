"""CIFAR-10 from the official binary files, or a download of them.

Krizhevsky, "Learning multiple layers of features from tiny images" (2009),
https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polarstep.rng import generator
from polarstep_lab.data.download import DatasetError, Progress, announced, download

__all__ = ["Cifar10", "download_cifar10", "load_cifar10"]

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
"""Published on the data set's page, for the binary version."""

BINARY = "cifar-10-batches-bin"
TRAIN_FILES = [f"data_batch_{number}" for number in range(1, 6)]
TEST_FILE = "test_batch"
PIXELS = 3 * 32 * 32
CLASSES = 10


@dataclass(frozen=True)
class Cifar10:
    """Images as uint8 ``(count, 3, 32, 32)`` and labels as int64, training and test."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @cached_property
    def train_digest(self) -> str:
        """What tells the content of the training files from other content."""
        return _digest(self.train_images, self.train_labels)

    @cached_property
    def test_digest(self) -> str:
        """What tells the content of the test file from other content."""
        return _digest(self.test_images, self.test_labels)

    def split(self, held_out: int, seed: int) -> tuple[Tensor, Tensor]:
        """Indices of the training images to train on, and of those held out for validation."""
        count = len(self.train_labels)
        if not 0 < held_out < count:
            raise DatasetError(
                f"cannot hold out {held_out} of {count} training images: expected between 1 and "
                f"{count - 1}"
            )
        order = torch.randperm(count, generator=generator(seed, "cifar10-split"))
        return order[held_out:].sort().values, order[:held_out].sort().values


def _digest(images: Tensor, labels: Tensor) -> str:
    """The first 32 hex digits of a SHA-256 over the number of images, the labels and all pixels.

    It is of the content, and not of the files.
    """
    digest = hashlib.sha256(len(labels).to_bytes(8, "little"))
    digest.update(labels.numpy().astype(np.uint8).data)
    digest.update(images.contiguous().numpy().data)
    return digest.hexdigest()[:32]


def load_cifar10(root: Path | str) -> Cifar10:
    """Read the official binary version of CIFAR-10 below ``root``, or at it."""
    root = Path(root)
    for folder in (root / BINARY, root):
        files = [folder / f"{name}.bin" for name in (*TRAIN_FILES, TEST_FILE)]
        present = [file for file in files if file.is_file()]
        if not present:
            continue
        if len(present) < len(files):
            missing = ", ".join(file.name for file in files if file not in present)
            raise DatasetError(f"{folder} is incomplete: {missing} is missing; unpack it again")
        return _read_files(tuple((file, *_version(file)) for file in files))
    raise DatasetError(
        f"no CIFAR-10 in {root.absolute()}. Put the files of the binary version there: "
        f"{root / BINARY}/data_batch_1.bin … data_batch_5.bin and test_batch.bin (from {URL}). With a "
        f"network, `polarstep download cifar10 --to {root}` does it; data kept elsewhere is found "
        "with --set data.root=DIR"
    )


@lru_cache(maxsize=1)
def _read_files(files: tuple[tuple[Path, int, int], ...]) -> Cifar10:
    """The data set of these files; a process that makes many runs reads it once."""
    parts = [_read_binary(file) for file, *_ in files]
    labels = [torch.from_numpy(part[0].astype(np.int64)) for part in parts]
    images = [torch.from_numpy(part[1].reshape(-1, 3, 32, 32)) for part in parts]
    return Cifar10(torch.cat(images[:-1]), torch.cat(labels[:-1]), images[-1], labels[-1])


def _version(file: Path) -> tuple[int, int]:
    """Size and time of the last change of a file, by which a changed file is noticed."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _read_binary(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Labels and images of one binary file: records of a label byte and 3072 pixel bytes."""
    raw = np.fromfile(path, dtype=np.uint8)
    record = PIXELS + 1
    if raw.size == 0 or raw.size % record:
        raise DatasetError(
            f"{path} has {raw.size:,} bytes, not a multiple of {record} (one label and {PIXELS} "
            "pixels): it is truncated or not the binary version; unpack it again"
        )
    rows = raw.reshape(-1, record)
    return _checked(path, rows[:, 0].tolist(), np.ascontiguousarray(rows[:, 1:]))


def _checked(
    path: Path, labels: list[int], images: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Labels and images, after checking that the labels are those of ten classes."""
    if min(labels) < 0 or max(labels) >= CLASSES:
        raise DatasetError(
            f"{path} has labels from {min(labels)} to {max(labels)}; CIFAR-10 has 0 to 9. Is it "
            "CIFAR-100?"
        )
    return np.array(labels, dtype=np.uint8), images


def download_cifar10(root: Path | str, progress: Progress = lambda *_: None) -> Path:
    """Download the binary version to ``root``, check its MD5 sum, unpack it; return the folder."""
    archive = Path(root) / "cifar-10-binary.tar.gz"
    if not archive.exists():
        size = int(announced(URL)["Content-Length"])
        download(URL, archive, size, "md5", MD5, progress).replace(archive)
    with archive.open("rb") as file:  # it may have been copied there by other means
        if hashlib.file_digest(file, "md5").hexdigest() != MD5:
            raise DatasetError(
                f"{archive} has not the MD5 sum {MD5}: remove it, and download it again"
            )
    with tarfile.open(archive) as packed:
        packed.extractall(root, filter="data")
    return Path(root) / BINARY
