"""``polarstep download fineweb`` from a server on this machine: checked, resumed, and not made twice."""

from __future__ import annotations

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from polarstep_lab.cli import app
from polarstep_lab.data import fineweb
from polarstep_lab.data.download import DatasetError
from polarstep_lab.data.shards import open_shard


def shard(seed: int, tokens: int = 5000) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, tokens
    drawn = np.random.default_rng(seed).integers(0, 50257, tokens)
    return header.tobytes() + drawn.astype("<u2").tobytes()


@pytest.fixture
def server():
    """A server with two shards, which redirects to the files as Hugging Face does."""
    names = fineweb.fineweb_names(1)
    files = {f"/{name}": shard(seed) for seed, name in enumerate(names)}

    class Handler(BaseHTTPRequestHandler):
        asked: ClassVar[list[str]] = []
        cut = 0
        damage = False

        def do_HEAD(self):
            content = files[self.path]
            self.send_response(302)
            self.send_header("Location", f"/cdn{self.path}")
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.end_headers()

        def do_GET(self):
            if not self.path.startswith("/cdn"):
                self.do_HEAD()
                return
            content = files[self.path.removeprefix("/cdn")]
            first = int(re.search(r"bytes=(\d+)-", self.headers["Range"])[1])
            self.asked.append(f"{self.path} {first}")
            sent = content[first:]
            if self.damage:
                sent = bytes([sent[0] ^ 1]) + sent[1:]
            self.send_response(206)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            if Handler.cut:
                sent = sent[: Handler.cut]
                Handler.cut = 0
            self.wfile.write(sent)

        def log_message(self, *_):
            pass

    Handler.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        Handler.url = f"http://127.0.0.1:{running.server_port}"
        Handler.files = files
        yield Handler
        running.shutdown()


def test_shards_are_downloaded_once(server, tmp_path):
    told = []
    for _ in range(2):
        found = fineweb.download_fineweb(
            tmp_path, 1, lambda *progress: told.append(progress), server.url
        )
    assert [path.name for path in found] == fineweb.fineweb_names(1)
    assert [path.read_bytes() for path in found] == list(server.files.values())
    assert len(open_shard(found[0])) == 5000
    assert len(server.asked) == 2
    name, there, size = told[-1]
    assert (name, there) == (found[1].name, size)


def test_a_download_that_is_cut_off_goes_on_where_it_stopped(server, tmp_path):
    server.cut = 3000
    found = fineweb.download_fineweb(tmp_path, 1, url=server.url)
    assert found[0].read_bytes() == next(iter(server.files.values()))
    assert server.asked[1].endswith(" 3000")


def test_what_is_damaged_is_not_kept(server, tmp_path):
    server.damage = True
    with pytest.raises(DatasetError, match="it was damaged on the way"):
        fineweb.download_fineweb(tmp_path, 1, url=server.url)
    assert list(tmp_path.iterdir()) == []


def test_the_command(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "URL", server.url)
    monkeypatch.setattr(fineweb.download_fineweb, "__defaults__", (5, lambda *_: None, server.url))
    result = CliRunner().invoke(
        app, ["download", "fineweb", "--shards", "1", "--to", str(tmp_path)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "fineweb10B").glob("*.bin"))) == 2
    refused = CliRunner().invoke(app, ["download", "fineweb", "--shards", "0"])
    assert "expected 1 to 103" in refused.output
