"""Run directories sent as bytes."""

from __future__ import annotations

import io
import tarfile

import pytest

from polarstep_lab.records.mark import LOCK
from polarstep_lab.records.record import RESULT
from polarstep_lab.storage import StorageError
from polarstep_lab.suites.sending import archived, unpack


def packed(*names: str) -> bytes:
    """An archive of empty files in this order."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return content.getvalue()


def test_what_was_packed_is_unpacked_without_the_lock(tmp_path):
    for name in ("config.json", LOCK, "report/page.html"):
        path = tmp_path / "sent" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    unpack(archived(tmp_path / "sent"), tmp_path / "run")
    found = {p.relative_to(tmp_path / "run").as_posix() for p in (tmp_path / "run").rglob("*.*")}
    assert found == {"config.json", "report/page.html"}
    assert (tmp_path / "run/report/page.html").read_text() == "report/page.html"


@pytest.mark.parametrize("name", ["../outside", "report/../../outside", "/outside"])
def test_an_archive_cannot_write_outside_the_directory(name, tmp_path):
    with pytest.raises(StorageError, match=r"outside', expected a name below the run directory"):
        unpack(packed(name), tmp_path / "run")
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


def test_the_result_is_written_last(tmp_path):
    """A run whose other files are not all there counts as unfinished."""
    with pytest.raises(StorageError, match="nothing outside is written"):
        unpack(packed(RESULT, "config.json", "../outside"), tmp_path)
    assert (tmp_path / "config.json").exists()
    assert not (tmp_path / RESULT).exists()
