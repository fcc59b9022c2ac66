"""Files of runs: the old version or the new, logs end with a whole line, errors say what to do."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from polarstep_lab.storage import (
    JsonLines,
    StorageError,
    read_json,
    read_lines,
    refuse_unwritable,
    to_json,
    write_atomically,
    write_json,
)


def failing(number):
    """A function that fails as the system does with this error number."""

    def write(*_):
        raise OSError(number, os.strerror(number))

    return write


def test_a_file_is_written_with_its_folders_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    for text in (b"one", b"two"):
        write_atomically(path, lambda file, text=text: file.write(text))
        assert path.read_bytes() == text
        assert os.listdir(path.parent) == ["file"]


def test_others_may_read_a_file_as_far_as_the_umask_allows(tmp_path):
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", lambda file: file.write(b""))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path, older = tmp_path / "file", tmp_path / "older"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"half")
        raise error

    with pytest.raises(error):
        write_atomically(path, write, keep=older)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_keep_is_the_version_before(tmp_path):
    path, older = tmp_path / "file", tmp_path / "older"
    write_atomically(path, lambda file: file.write(b"1"), keep=older)
    assert not older.exists()  # there was none before
    for version in (b"2", b"3"):
        before = path.read_bytes()
        write_atomically(path, lambda file, version=version: file.write(version), keep=older)
        assert (path.read_bytes(), older.read_bytes()) == (version, before)


def test_the_file_is_on_disk_before_it_has_its_name_and_the_name_after(tmp_path, monkeypatch):
    events = []
    sync, rename = os.fsync, os.replace

    def synced(handle):
        events.append("folder" if os.path.samestat(os.fstat(handle), folder) else "file")
        sync(handle)

    def renamed(old, new):
        events.append("rename")
        rename(old, new)

    folder = tmp_path.stat()
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_atomically(tmp_path / "file", lambda file: file.write(b"x"))
    assert events == ["file", "rename", "folder"]


def test_handles_are_closed(tmp_path):
    handles = Path("/proc/self/fd")
    if not handles.exists():
        pytest.skip("counts handles in /proc")
    before = len(list(handles.iterdir()))
    for _ in range(3):
        write_atomically(tmp_path / "file", lambda file: file.write(b"x"))
    assert len(list(handles.iterdir())) == before


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "no space left to write .*file: free some disk space"),
        (errno.EDQUOT, "no space left to write .*file: free some disk space"),
        (errno.EFBIG, "file would be larger than a file may be here: raise the limit"),
    ],
)
def test_lack_of_room_says_what_to_do(tmp_path, number, message):
    with pytest.raises(StorageError, match=f"{message}.*--resume; everything written before"):
        write_atomically(tmp_path / "file", failing(number))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("explicitly", [False, True])
def test_lack_of_room_is_found_behind_another_error(tmp_path, explicitly):
    """torch.save raises a RuntimeError while it handles the OSError."""

    def write(file):
        try:
            failing(errno.ENOSPC)()
        except OSError as error:
            if explicitly:
                raise RuntimeError("write failed") from error
            raise RuntimeError("write failed")  # noqa: B904

    with pytest.raises(StorageError, match="no space left"):
        write_atomically(tmp_path / "file", write)


def test_other_errors_are_raised_as_they_are(tmp_path):
    with pytest.raises(OSError, match="Input/output"):
        write_atomically(tmp_path / "file", failing(errno.EIO))


def test_a_last_line_without_its_end_is_not_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": 3}')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_bytes(b'{"a": 1}')
    assert read_lines(path) == []


def test_a_line_that_is_no_object_is_shown(tmp_path):
    (tmp_path / "file").write_text('{"a": 1}\n"' + 100 * "x" + '"\n')
    with pytest.raises(StorageError, match=r'file, line 2, is "x{39}, expected a JSON object'):
        read_lines(tmp_path / "file")


def test_a_log_goes_on_where_it_is_cut(tmp_path):
    path = tmp_path / "log"
    log = JsonLines(path)
    assert log.sync() == 0
    log.write({"step": 1, "loss": math.nan})
    length = log.sync()
    assert length == path.stat().st_size
    log.write({"step": 2})
    assert read_lines(path) == [{"step": 1, "loss": None}, {"step": 2}]  # without a sync
    log.close()
    resumed = JsonLines(path, length)
    assert read_lines(path) == [{"step": 1, "loss": None}]
    resumed.write({"step": 7})
    resumed.close()
    assert read_lines(path) == [{"step": 1, "loss": None}, {"step": 7}]
    JsonLines(path).close()
    assert path.read_bytes() == b""


class Short:
    """A file that takes few bytes at a time, and none after the first ``room``."""

    def __init__(self, room=1000):
        self.taken, self.room = b"", room

    def write(self, line):
        if len(self.taken) >= self.room:
            failing(errno.ENOSPC)()
        part = bytes(line[: min(3, self.room - len(self.taken))])
        self.taken += part
        return len(part)


def test_a_line_is_written_to_its_end_or_there_is_an_error(tmp_path):
    log = JsonLines(tmp_path / "log")
    log.close()
    log._file = Short()
    log.write({"step": 12, "loss": 0.5})
    assert log._file.taken == b'{"step": 12, "loss": 0.5}\n'
    log._file = Short(room=7)
    with pytest.raises(StorageError, match=r"no space left to write .*log"):
        log.write({"step": 12, "loss": 0.5})


def test_a_sync_without_room_says_what_to_do(tmp_path, monkeypatch):
    log = JsonLines(tmp_path / "log")
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(StorageError, match="no space left"):
        log.sync()
    log.close()


def test_a_folder_that_may_not_be_written_to_is_refused_and_nothing_is_made(tmp_path, monkeypatch):
    path = tmp_path / "a" / "b" / "file"
    refuse_unwritable(path, "--out")
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(
        os, "access", lambda place, mode: place != tmp_path
    )  # root may write anywhere
    with pytest.raises(StorageError, match=r"that cannot be written to: choose another --out"):
        refuse_unwritable(path, "--out")


def test_json_has_no_values_of_its_own(tmp_path):
    value = {"a": (1, 2.5, True, None), 3: math.nan, "c": [math.inf, -math.inf], "p": Path("x/y")}
    plain = {"a": [1, 2.5, True, None], "3": None, "c": [None, None], "p": "x/y"}
    assert to_json(value) == plain
    write_json(tmp_path / "file", value)
    text = (tmp_path / "file").read_text()
    assert json.loads(text) == plain == read_json(tmp_path / "file")
    assert text.endswith("}\n")
    assert '\n  "a"' in text  # indented, for readers


def test_json_is_written_in_its_own_letters(tmp_path):
    write_json(tmp_path / "file", {"σ": "‖T‖"})
    assert '"σ": "‖T‖"' in (tmp_path / "file").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_a_number_that_is_not_finite_is_named(tmp_path, number):
    (tmp_path / "file").write_text(f'{{"lr": {number}}}')
    with pytest.raises(StorageError, match=f"not valid JSON: {number} is not a finite number"):
        read_json(tmp_path / "file")
    (tmp_path / "file").write_text('{"lr": 1e300, "count": 12}')
    assert read_json(tmp_path / "file") == {"lr": 1e300, "count": 12}


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_not_json_is_named(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(StorageError, match="file is not valid JSON"):
        read_json(tmp_path / "file")
    (tmp_path / "file").write_bytes(b'{"a": 1}\n' + content + b"\n")
    with pytest.raises(StorageError, match="file, line 2, is not valid JSON"):
        read_lines(tmp_path / "file")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(StorageError, match="file does not exist"):
        read_json(tmp_path / "file")
    assert read_lines(tmp_path / "file") == []
