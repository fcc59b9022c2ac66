"""Which rank computes which matrices: ``bring`` M to the rank that does, and ``send_back`` T."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from torch import Tensor

from polarstep.bucket import Bucket, Engine
from polarstep.maps import MapState, Polar

__all__ = ["ALONE", "Alone", "Brought", "Exchange", "SentBack"]

# Generators that yield, wherever they wait for other ranks, the bytes that they hold meanwhile.
Brought = Generator[int, None, tuple[Tensor, MapState]]
SentBack = Generator[int, None, tuple[Polar, MapState]]


class Exchange(Protocol):
    """What a bucket's step asks of the ranks."""

    def bring(self, b: Any, engine: Any) -> Brought:
        """M of the matrices that this rank computes, and what the last step left for them."""

    def send_back(self, b: Any, polar: Polar, left: MapState) -> SentBack:
        """T of the matrices that this rank updates, and what the map leaves for their next step."""


class Alone:
    """This rank has every matrix of the bucket and computes all of them."""

    def bring(self, b: Bucket, engine: Engine) -> Brought:
        """M as the engine makes it."""
        return engine.momentum(b), b.carry()
        yield  # a generator that never waits

    def send_back(self, b: Bucket, polar: Polar, left: MapState) -> SentBack:
        """T as it is."""
        return polar, left
        yield


ALONE = Alone()
