"""The small text shipped with the package, and its characters as tokens.

It is enough to train a laptop-sized GPT without a download. ``data/text/PROVENANCE.md`` says where it
comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from polarstep_lab.settings_by_name import ConfigError

__all__ = ["CharacterVocabulary", "TextError", "corpus_names", "corpus_text", "corpus_tokens"]

VALIDATION_FRACTION = 0.1


class TextError(ValueError):
    """A text cannot be turned into tokens; the message says which, why and what to do."""


@dataclass(frozen=True)
class CharacterVocabulary:
    """Characters as tokens, numbered in sorted order.

    >>> vocabulary = CharacterVocabulary.of("banana")
    >>> vocabulary.encode("nab").tolist(), vocabulary.decode([1, 0, 2])
    ([2, 0, 1], 'ban')
    """

    characters: str

    @classmethod
    def of(cls, text: str) -> CharacterVocabulary:
        """All characters of ``text``, sorted."""
        if not text:
            raise TextError(
                "the text is empty: a character vocabulary needs at least one character; give text "
                "files with more than white space"
            )
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> NDArray[np.uint16]:
        """The tokens of ``text``, one per character."""
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        known = np.frombuffer(self.characters.encode("utf-32-le"), dtype=np.uint32)
        tokens = np.searchsorted(known, points).clip(max=len(known) - 1)
        strange = known[tokens] != points
        if strange.any():
            character = chr(int(points[int(strange.argmax())]))
            raise TextError(
                f"the character {character!r} is not among the {len(self)} of this vocabulary: make the "
                "vocabulary from all texts together"
            )
        return tokens.astype(np.uint16)

    def decode(self, tokens: NDArray[np.integer] | list[int]) -> str:
        """The text of ``tokens``."""
        return "".join(self.characters[int(token)] for token in tokens)


def corpus_names() -> list[str]:
    """The texts shipped with the package."""
    folder = resources.files("polarstep_lab.data") / "text"
    return sorted(
        file.name.removesuffix(".txt") for file in folder.iterdir() if file.name.endswith(".txt")
    )


def corpus_text(name: str = "tinyshakespeare") -> str:
    """A shipped text in full."""
    if name not in corpus_names():
        raise ConfigError(
            f"no text named {name!r} is shipped: expected {', '.join(corpus_names())}. To train on "
            "a text of your own, turn it into shards with `polarstep tokenize`"
        )
    file = resources.files("polarstep_lab.data") / "text" / f"{name}.txt"
    return file.read_text(encoding="utf-8")


@cache
def corpus_tokens(
    name: str = "tinyshakespeare",
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], CharacterVocabulary]:
    """Training tokens, validation tokens (the last tenth) and the vocabulary of a shipped text.

    Every run asks for both parts. They are encoded once, and shared: they are not to be written to.
    """
    text = corpus_text(name)
    vocabulary = CharacterVocabulary.of(text)
    tokens = vocabulary.encode(text)
    cut = round(len(tokens) * (1 - VALIDATION_FRACTION))
    return tokens[:cut], tokens[cut:], vocabulary
