"""Randomness as an argument: generators made from a key, never the global one.

A sketch is drawn from a generator that is a pure function of its key, so the sketch of a step can
be drawn again after a resume, in another process, or by a test:

>>> a = generator(0, "768x768", 41)
>>> b = generator(0, "768x768", 41)
>>> torch.equal(torch.randn(3, generator=a), torch.randn(3, generator=b))
True

There is one exception. Each replay of a CUDA graph draws new numbers only from torch's default
generator. So :func:`generator` returns the default generator while a graph is captured.
"""

from __future__ import annotations

import hashlib

import torch

from polarstep.context import in_a_graph

__all__ = ["generator", "key_to_seed"]


def key_to_seed(*key: int | str) -> int:
    """Hash a key to a seed of 63 bits; distinct keys give unrelated seeds.

    A cryptographic hash rather than ``hash()``, which Python salts anew in every process.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator on ``device`` whose stream is a function of ``key`` alone.

    While a CUDA graph is captured, return torch's default generator of that GPU instead, which
    ``torch.manual_seed`` seeds and every replay advances.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise TypeError(
            "a tensor on the meta device has no random numbers: expected one with data; "
            'give the model memory first, as model.to_empty(device="cpu")'
        )
    if device.type == "cuda" and in_a_graph():
        here = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[here]
    return torch.Generator(device=device).manual_seed(key_to_seed(*key))
