"""CIFAR-10 files and augmented batches."""

from __future__ import annotations

import hashlib
import http.server
import re
import tarfile
import threading

import pytest
import torch
from tests.lab.experiments.small import fake_cifar10
from typer.testing import CliRunner

from polarstep_lab.cli import app
from polarstep_lab.data import augment, cifar10
from polarstep_lab.data.augment import ImageBatches, Normalizer, reflect_pad, translate
from polarstep_lab.data.cifar10 import DatasetError, download_cifar10, load_cifar10


def test_images_are_found_below_a_folder_or_at_it(tmp_path):
    fake_cifar10(tmp_path)
    found, direct = (load_cifar10(tmp_path / name) for name in ("", "cifar-10-batches-bin"))
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        assert torch.equal(getattr(found, name), getattr(direct, name))
    assert found.train_images.shape == (200, 3, 32, 32)
    assert found.train_images.dtype == torch.uint8
    assert found.test_labels.tolist() == [i % 10 for i in range(40)]


@pytest.mark.parametrize("place", [0, -1], ids=["a label", "a pixel"])
@pytest.mark.parametrize("name", ["data_batch_1", "test_batch"])
def test_a_digest_finds_other_content(tmp_path, name, place):
    path = fake_cifar10(tmp_path) / "cifar-10-batches-bin" / f"{name}.bin"
    before = load_cifar10(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    cifar10._read_files.cache_clear()  # the clock of a file system may be too coarse to tell
    after = load_cifar10(tmp_path)
    assert re.fullmatch("[0-9a-f]{32}", before.train_digest)
    assert (before.train_digest == after.train_digest) == (name == "test_batch")
    assert (before.test_digest == after.test_digest) == (name != "test_batch")


def test_without_data_it_says_what_to_put_where(tmp_path):
    with pytest.raises(DatasetError) as caught:
        load_cifar10(tmp_path / "data")
    for part in (
        "cifar-10-batches-bin/data_batch_1.bin",
        "test_batch",
        cifar10.URL,
        "--set data.ro",
    ):
        assert part in str(caught.value)


def test_damaged_files_are_named(tmp_path):
    folder = fake_cifar10(tmp_path) / "cifar-10-batches-bin"
    (folder / "data_batch_3.bin").rename(folder / "aside")
    with pytest.raises(DatasetError, match=r"incomplete: data_batch_3\.bin is missing"):
        load_cifar10(tmp_path)
    raw = (folder / "aside").read_bytes()
    (folder / "data_batch_3.bin").write_bytes(raw[:-7])
    with pytest.raises(DatasetError, match=r"data_batch_3\.bin has .* not a multiple of 3073"):
        load_cifar10(tmp_path)
    (folder / "data_batch_3.bin").write_bytes(b"\x63" + raw[1:])
    with pytest.raises(DatasetError, match=r"labels from 0 to 99"):
        load_cifar10(tmp_path)


def test_download_checks_the_sum_and_unpacks(tmp_path, monkeypatch):
    source = fake_cifar10(tmp_path / "source")
    archive = tmp_path / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(source / "cifar-10-batches-bin", "cifar-10-batches-bin")
    target = tmp_path / "data"
    target.mkdir()
    # The archive is there already, as after copying it by hand: no network is needed.
    (target / "cifar-10-binary.tar.gz").write_bytes(archive.read_bytes())
    monkeypatch.setattr(cifar10, "URL", "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    with pytest.raises(DatasetError, match="remove it, and download it again"):
        download_cifar10(target)
    monkeypatch.setattr(cifar10, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    assert download_cifar10(target) == target / "cifar-10-batches-bin"
    assert len(load_cifar10(target).train_labels) == 200


@pytest.mark.parametrize("name", ["../outside", "cifar-10-batches-bin/link"])
def test_an_archive_cannot_write_outside_the_folder(name, tmp_path, monkeypatch):
    """Not even one that has the right sum, as a mirror might announce its own."""
    target = tmp_path / "data"
    target.mkdir()
    archive = target / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        member = tarfile.TarInfo(name)
        if name.endswith("link"):
            member.type, member.linkname = tarfile.SYMTYPE, "../../outside"
        packed.addfile(member)
    monkeypatch.setattr(cifar10, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    with pytest.raises(tarfile.FilterError):
        download_cifar10(target)
    assert sorted(tmp_path.rglob("*")) == [target, archive]


def test_the_download_command(tmp_path, monkeypatch):
    source = fake_cifar10(tmp_path / "source")
    served = tmp_path / "served"
    served.mkdir()
    archive = served / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(source / "cifar-10-batches-bin", "cifar-10-batches-bin")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(served))

        def log_message(self, *args): ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(cifar10, "URL", f"http://127.0.0.1:{server.server_port}/{archive.name}")
    target = tmp_path / "data"
    arguments = ["download", "cifar10", "--to", str(target)]
    wrong = CliRunner().invoke(app, arguments)
    assert wrong.exit_code == 1
    assert "it was damaged on the way and is removed" in " ".join(wrong.output.split())
    monkeypatch.setattr(cifar10, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    right = CliRunner().invoke(app, arguments)
    server.shutdown()
    assert right.exit_code == 0, right.output
    assert len(load_cifar10(target).train_labels) == 200


def test_a_download_into_a_file_is_refused_before_it_begins(tmp_path, monkeypatch):
    (tmp_path / "data").write_text("mine")
    monkeypatch.setattr(cifar10, "URL", "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    outcome = CliRunner().invoke(app, ["download", "cifar10", "--to", str(tmp_path / "data")])
    assert outcome.exit_code == 1
    said = " ".join(outcome.output.split())
    assert "data is a file, expected a folder: choose another --to" in said
    assert "network" not in said


def test_the_held_out_images_depend_on_the_seed(tmp_path):
    data = load_cifar10(fake_cifar10(tmp_path))
    kept, held = data.split(50, seed=0)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(200))
    assert torch.equal(held, data.split(50, seed=0)[1])
    assert not torch.equal(held, data.split(50, seed=1)[1])
    with pytest.raises(DatasetError, match="cannot hold out 200 of 200"):
        data.split(200, seed=0)


def test_normalized_images_have_mean_zero_and_deviation_one():
    images = torch.randint(0, 256, (50, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    normal = Normalizer.of(images.byte())(images.byte())
    assert normal.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (normal.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-4


def test_padding_reflects_as_torch_does():
    images = torch.rand(2, 3, 8, 8)
    expected = torch.nn.functional.pad(images, (2, 2, 2, 2), mode="reflect")
    assert torch.equal(reflect_pad(images, 2), expected)


def test_translation_is_a_crop():
    padded = torch.rand(5, 3, 12, 12)
    shifts = torch.tensor([[0, 0], [4, 4], [1, 3], [2, 2], [4, 0]])
    moved = translate(padded, shifts, 8)
    for i, (y, x) in enumerate(shifts.tolist()):
        assert torch.equal(moved[i], padded[i, :, y : y + 8, x : x + 8])


def batches(**options):
    images = torch.randint(0, 256, (20, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    settings = {"batch_size": 6, "seed": 0} | options
    labels = torch.arange(20)
    return ImageBatches(images.byte(), labels, Normalizer.of(images.byte()), **settings)


def test_epochs_are_shuffled_and_drop_the_rest():
    data = batches()
    assert data.per_epoch == 3
    seen = torch.cat([data.batch(step)[1] for step in range(3)])
    assert len(set(seen.tolist())) == 18
    again = torch.cat([data.batch(step)[1] for step in range(3, 6)])
    assert not torch.equal(seen, again)


def test_batches_are_a_function_of_seed_and_step():
    assert all(
        torch.equal(a, b) for a, b in zip(batches().batch(7), batches().batch(7), strict=True)
    )
    assert not torch.equal(batches().batch(7)[0], batches(seed=1).batch(7)[0])


def test_the_next_epoch_is_drawn_before_it_begins():
    data = batches(seed=21)
    steps = range(3 * data.per_epoch)
    drawn = []
    for step in steps:
        before = augment._plan.cache_info().misses
        data.selection(step)
        drawn.append(augment._plan.cache_info().misses - before)
    assert drawn == [1, 1, 0, 0, 1, 0, 0, 1, 0]


def test_alternating_flip_shows_both_sides_in_two_epochs():
    data = batches(batch_size=20, translation=0)
    (first, labels), (second, others) = data.batch(0), data.batch(1)
    a, b = first[labels.argsort()], second[others.argsort()]
    assert torch.equal(a, b.flip(-1))
    plain = data.normalize(data.images)
    mirrored = [not torch.equal(x, y) for x, y in zip(a, plain, strict=True)]
    assert 0 < sum(mirrored) < 20


def test_without_augmentation_images_are_themselves():
    data = batches(flip=False, translation=0)
    images, labels = data.batch(4)
    assert torch.equal(images, data.normalize(data.images[labels]))


def test_a_batch_larger_than_the_set_is_refused():
    with pytest.raises(ValueError, match="expected 1 to 20"):
        batches(batch_size=21)
