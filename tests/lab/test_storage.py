"""Files of runs: what is refused, what JSON holds, and what errors say of going on."""

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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_lack_of_room_says_how_the_run_goes_on(tmp_path, number, monkeypatch):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    log = JsonLines(tmp_path / "log")
    monkeypatch.setattr(os, "fsync", fails)
    words = (
        r", then run the same command again; where a run has begun, .*--resume; everything written"
    )
    for attempt in (
        lambda: write_atomically(tmp_path / "file", fails),
        lambda: write_json(tmp_path / "file", {}),
        log.sync,
    ):
        with pytest.raises(StorageError, match=words):
            attempt()
    log.close()
    assert os.listdir(tmp_path) == ["log"]
