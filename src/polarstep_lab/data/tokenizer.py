"""From text files to token shards, with GPT-2's vocabulary from local files or with characters.

With GPT-2's vocabulary every document begins with the end-of-text token, as in the FineWeb shards of
modded-nanogpt. Character vocabularies have no such token: documents are joined without a separator.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from polarstep.checked_values import check_fraction, check_integer
from polarstep_lab.data.corpus import CharacterVocabulary, TextError
from polarstep_lab.data.shards import write_shard
from polarstep_lab.storage import StorageError, read_json, write_json

if TYPE_CHECKING:
    import tiktoken

__all__ = [
    "Characters",
    "Gpt2",
    "ShardSummary",
    "Tokenizer",
    "VocabularyError",
    "read_documents",
    "shards_with_prefix",
    "tokenize_files",
    "vocab_size_beside",
]

GPT2_TOKENS = 50257
END_OF_TEXT = "<|endoftext|>"
VOCABULARY_FILE = "vocabulary.json"


class VocabularyError(ValueError):
    """The vocabulary files are missing or are not GPT-2's, or a folder has another vocabulary."""


class Tokenizer(Protocol):
    """Turns one document into tokens."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""

    def encode(self, document: str) -> NDArray[np.uint16]:
        """The tokens of a document."""

    def describe(self) -> dict[str, object]:
        """The content of ``vocabulary.json``, which is written beside the shards."""


@dataclass(frozen=True)
class Characters:
    """One token per character."""

    vocabulary: CharacterVocabulary

    @property
    def vocab_size(self) -> int:
        """How many distinct characters there are."""
        return len(self.vocabulary)

    def encode(self, document: str) -> NDArray[np.uint16]:
        """One token per character."""
        return self.vocabulary.encode(document)

    def describe(self) -> dict[str, object]:
        """The characters in order."""
        return {
            "tokenizer": "characters",
            "vocab_size": self.vocab_size,
            "characters": self.vocabulary.characters,
        }


class Gpt2:
    """GPT-2's byte-pair encoding, read from local files; nothing is downloaded."""

    def __init__(self, vocabulary: Path) -> None:
        """Read the vocabulary.

        ``vocabulary`` is ``r50k_base.tiktoken``, or a folder with that file or with OpenAI's
        original pair ``encoder.json`` and ``vocab.bpe``.
        """
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

        ranks = _read_ranks(vocabulary)
        if sorted(ranks.values()) != list(range(GPT2_TOKENS - 1)):
            raise VocabularyError(
                f"{vocabulary} has {len(ranks)} tokens; GPT-2 has {GPT2_TOKENS - 1} besides the end of "
                "text: use r50k_base.tiktoken"
            )
        self.encoding: tiktoken.Encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: GPT2_TOKENS - 1},
            explicit_n_vocab=GPT2_TOKENS,
        )

    @property
    def vocab_size(self) -> int:
        """50257."""
        return GPT2_TOKENS

    def encode(self, document: str) -> NDArray[np.uint16]:
        """End of text, then the document; a ``<|endoftext|>`` inside it is read as plain characters."""
        body = self.encoding.encode_ordinary(document)
        return np.array([GPT2_TOKENS - 1, *body], dtype=np.uint16)

    def describe(self) -> dict[str, object]:
        """The name and the size of the vocabulary."""
        return {"tokenizer": "gpt2", "vocab_size": GPT2_TOKENS, "end_of_text": GPT2_TOKENS - 1}


def _read_ranks(vocabulary: Path) -> dict[bytes, int]:
    """Byte strings and their ranks, from either of the two file formats."""
    if vocabulary.is_dir():
        encoder, merges = vocabulary / "encoder.json", vocabulary / "vocab.bpe"
        if (vocabulary / "r50k_base.tiktoken").exists():
            vocabulary = vocabulary / "r50k_base.tiktoken"
        elif encoder.exists() and merges.exists():
            from tiktoken.load import data_gym_to_mergeable_bpe_ranks

            try:
                pair: dict[bytes, int] = data_gym_to_mergeable_bpe_ranks(
                    vocab_bpe_file=str(merges), encoder_json_file=str(encoder)
                )
            except (ValueError, AssertionError) as error:  # tiktoken asserts that the two fit
                raise VocabularyError(
                    f"{encoder} and {merges} are no GPT-2 vocabulary ({error}): download them again, or "
                    "use r50k_base.tiktoken"
                ) from error
            return pair
    if not vocabulary.is_file():
        raise VocabularyError(
            f"no GPT-2 vocabulary at {vocabulary}: expected r50k_base.tiktoken (from "
            "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken), or a folder "
            "with it or with encoder.json and vocab.bpe; or tokenize with --characters"
        )
    ranks = {}
    for number, line in enumerate(vocabulary.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise VocabularyError(
                f"{vocabulary}, line {number}: expected a base64 token and its rank; this is not "
                "a .tiktoken file"
            ) from None
    return ranks


@dataclass(frozen=True)
class ShardSummary:
    """The path of a written shard and its number of tokens."""

    path: Path
    tokens: int


def read_documents(path: Path, separator: str | None = None) -> list[str]:
    """The documents of a text file: the whole file, or its parts between ``separator`` lines."""
    if separator == "":
        raise TextError(
            "separator='': expected the text between two documents, as '<|endoftext|>'; leave it out if "
            "each file is one document"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; convert it, or "
            "leave it out"
        ) from None
    documents = [text] if separator is None else text.split(separator)
    return [document for document in documents if document.strip()]


def tokenize_files(
    files: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer,
    *,
    prefix: str = "text",
    separator: str | None = None,
    shard_tokens: int = 100_000_000,
    validation: float = 0.0,
    progress: Callable[[Path], object] = lambda _: None,
) -> list[ShardSummary]:
    """Write ``PREFIX_train_000001.bin``, … and, for ``validation > 0``, ``PREFIX_val_000000.bin``.

    ``validation`` is the fraction of the tokens, taken from the end, that goes to the validation
    shard. ``progress`` is called after each file.

    ``vocabulary.json`` describes all shards of a folder. Where it describes shards of another prefix,
    made with another vocabulary, nothing is written.
    """
    check_fraction("validation", validation, "0.1 holds out the last tenth")
    check_integer("shard_tokens", shard_tokens, 1, "100_000_000 makes shards of 200 MB")
    _refuse_another_vocabulary(out, prefix, tokenizer)
    tokens = _encoded(files, tokenizer, separator, progress)
    cut = len(tokens) - round(len(tokens) * validation)
    written = []
    for number, start in enumerate(range(0, cut, shard_tokens), start=1):
        part = tokens[start : min(start + shard_tokens, cut)]
        written.append(_write(out / f"{prefix}_train_{number:06d}.bin", part))
    if cut < len(tokens):
        written.append(_write(out / f"{prefix}_val_000000.bin", tokens[cut:]))
    write_json(out / VOCABULARY_FILE, tokenizer.describe())
    return written


def _encoded(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    separator: str | None,
    progress: Callable[[Path], object],
) -> NDArray[np.uint16]:
    """The tokens of all files, one after the other."""
    encoded: list[NDArray[np.uint16]] = []
    for file in files:
        encoded += map(tokenizer.encode, read_documents(file, separator))
        progress(file)
    if not encoded:
        raise TextError(
            f"no text in {', '.join(map(str, files))}: nothing to tokenize; give files with more than "
            "white space"
        )
    return np.concatenate(encoded)


def shards_with_prefix(folder: Path, prefix: str) -> list[Path]:
    """The shards in ``folder`` that :func:`tokenize_files` wrote with ``prefix``, sorted.

    Those of the prefix ``text_old`` are not those of ``text``.
    """
    name = re.compile(rf"{re.escape(prefix)}_(train|val)_\d+\.bin")
    return sorted(path for path in folder.glob("*.bin") if name.fullmatch(path.name))


def _refuse_another_vocabulary(out: Path, prefix: str, tokenizer: Tokenizer) -> None:
    """Raise if shards of another prefix in ``out`` have a vocabulary that would be overwritten."""
    path = out / VOCABULARY_FILE
    ours = shards_with_prefix(out, prefix)
    others = sorted(shard.name for shard in out.glob("*.bin") if shard not in ours)
    if others and path.exists() and read_json(path) != tokenizer.describe():
        raise VocabularyError(
            f"{path} is the vocabulary of {others[0]} and is not that of this text: one folder has one "
            "vocabulary; nothing was written, give another --out"
        )


def _write(path: Path, tokens: NDArray[np.uint16]) -> ShardSummary:
    write_shard(path, tokens)
    return ShardSummary(path, len(tokens))


def vocab_size_beside(shard: Path) -> int | None:
    """The vocabulary size that ``polarstep tokenize`` wrote beside a shard; None without the file."""
    path = shard.parent / VOCABULARY_FILE
    if not path.exists():
        return None
    noted = read_json(path)
    size = noted.get("vocab_size") if isinstance(noted, dict) else None
    if type(size) is not int or size < 1:
        raise StorageError(
            f"{path} says nothing of how many tokens there are (vocab_size={size!r}): expected the file "
            "that `polarstep tokenize` writes beside its shards; restore it, or move it away, and "
            "the run goes on without what it said"
        )
    return size
