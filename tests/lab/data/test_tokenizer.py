"""From text to shards: characters, GPT-2's vocabulary from local files, and the shipped text."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

import numpy as np
import pytest

from polarstep_lab.data.corpus import (
    CharacterVocabulary,
    corpus_names,
    corpus_text,
    corpus_tokens,
)
from polarstep_lab.data.shards import open_shard
from polarstep_lab.data.tokenizer import (
    Characters,
    Gpt2,
    VocabularyError,
    tokenize_files,
    vocab_size_beside,
)


def test_the_shipped_text_is_what_its_note_says():
    note = (resources.files("polarstep_lab.data") / "text" / "PROVENANCE.md").read_text()
    text = corpus_text()
    assert corpus_names() == ["tinyshakespeare"]
    assert hashlib.sha256(text.encode()).hexdigest() in note
    assert f"{len(text):,} bytes" in note
    assert f"{len(set(text))} distinct characters" in note


def test_the_shipped_text_as_tokens():
    train, val, vocabulary = corpus_tokens()
    text = corpus_text()
    assert len(train) + len(val) == len(text)
    assert len(val) == pytest.approx(0.1 * len(text), rel=1e-3)
    assert vocabulary.decode(train[:60]) + "…" == text[:60] + "…"
    assert vocabulary.decode(val[-60:]) == text[-60:]
    with pytest.raises(ValueError, match="no text named 'iliad' is shipped"):
        corpus_tokens("iliad")


@pytest.mark.parametrize("text", ["abba", "naïve café", "日本語 🙂 z", "\n\t "])
def test_characters_round_trip(text):
    vocabulary = CharacterVocabulary.of(text)
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert len(vocabulary) == len(set(text))


def test_an_unknown_character_is_named():
    with pytest.raises(ValueError, match="'q' is not among the 3"):
        CharacterVocabulary.of("abc").encode("aq")
    with pytest.raises(ValueError, match="empty"):
        CharacterVocabulary.of("")


def test_shards_of_characters(tmp_path):
    (tmp_path / "a.txt").write_text("hello ")
    (tmp_path / "b.txt").write_text("world")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    tokenizer = Characters(CharacterVocabulary.of("hello world"))
    written = tokenize_files(files, tmp_path / "out", tokenizer, shard_tokens=4, validation=0.28)
    names = [(summary.path.name, summary.tokens) for summary in written]
    assert names == [
        ("text_train_000001.bin", 4),
        ("text_train_000002.bin", 4),
        ("text_val_000000.bin", 3),
    ]
    tokens = np.concatenate([open_shard(summary.path) for summary in written])
    assert tokenizer.vocabulary.decode(tokens) == "hello world"
    assert vocab_size_beside(written[0].path) == 8


@pytest.fixture
def bytes_vocabulary(tmp_path):
    """A vocabulary of GPT-2's size in which only single bytes occur in text."""
    tokens = [bytes([b]) for b in range(256)]
    tokens += [b"\xff\xfe" + n.to_bytes(4, "big") for n in range(50256 - 256)]
    lines = (base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens))
    path = tmp_path / "r50k_base.tiktoken"
    path.write_bytes(b"\n".join(lines))
    return path


@pytest.mark.parametrize("as_folder", [False, True])
def test_gpt2_documents_begin_with_end_of_text(bytes_vocabulary, as_folder, tmp_path):
    tokenizer = Gpt2(bytes_vocabulary.parent if as_folder else bytes_vocabulary)
    assert tokenizer.encode("hi").tolist() == [50256, ord("h"), ord("i")]
    # Text that looks like the special token is text.
    assert len(tokenizer.encode("<|endoftext|>")) == 1 + len("<|endoftext|>")
    (tmp_path / "a.txt").write_text("ab\n---\ncd\n---\n  \n")
    written = tokenize_files([tmp_path / "a.txt"], tmp_path, tokenizer, separator="---\n")
    assert (open_shard(written[0].path) == 50256).sum() == 2


def test_files_that_are_no_vocabulary(bytes_vocabulary, tmp_path):
    with pytest.raises(VocabularyError, match=r"expected r50k_base\.tiktoken"):
        Gpt2(tmp_path / "absent.tiktoken")
    lines = bytes_vocabulary.read_bytes().split(b"\n")
    bytes_vocabulary.write_bytes(b"\n".join(lines[:1000]))
    with pytest.raises(VocabularyError, match="has 1000 tokens; GPT-2 has 50256"):
        Gpt2(bytes_vocabulary)
    bytes_vocabulary.write_text("hello\nworld\n")
    with pytest.raises(VocabularyError, match="line 1: expected a base64 token and its rank"):
        Gpt2(bytes_vocabulary)


@pytest.mark.parametrize(
    ("encoder", "merges"), [("{", "#version\n"), ('{"a": 0}', "#version\na b\n")]
)
def test_a_damaged_pair_of_files_is_named(encoder, merges, tmp_path):
    (tmp_path / "encoder.json").write_text(encoder)
    (tmp_path / "vocab.bpe").write_text(merges)
    with pytest.raises(VocabularyError, match=r"encoder\.json and .*vocab\.bpe are no GPT-2"):
        Gpt2(tmp_path)


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text: .* at byte 3"):
        tokenize_files([tmp_path / "a.txt"], tmp_path, Characters(CharacterVocabulary("a")))


def test_empty_texts_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match="nothing to tokenize"):
        tokenize_files([tmp_path / "a.txt"], tmp_path, Characters(CharacterVocabulary("a")))
