"""Gather a sharded matrix on all ranks that hold a part of it, while other arithmetic runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from polarstep.ranks import collectives
from polarstep.ranks.layout import Layout

if TYPE_CHECKING:
    from polarstep.bucket import TensorBucket
    from polarstep.engines.torch import TorchEngine
    from polarstep.maps import MapState, Polar
    from polarstep.ranks.exchange import Brought, SentBack

__all__ = ["Gathered", "Gathering"]


class Gathering:
    """The whole of a tensor that is cut like ``p``; ``part`` is this rank's part of it.

    Parts are put where the layout of ``p`` says, whatever their sizes, and no ``DTensor`` is made.
    """

    def __init__(self, part: Tensor, p: Tensor) -> None:
        layout = Layout.of(p)
        assert layout is not None
        self._shape = layout.shape
        self._boxes = [layout.boxes[i] for i in layout.peers]
        ranks = tuple(layout.ranks[i] for i in layout.peers)
        counts = [math.prod(stop - start for start, stop in box) for box in self._boxes]
        self._coming = collectives.share(part.reshape(-1), counts, ranks)

    def wait(self) -> Tensor:
        """The whole tensor; a GPU waits in its stream, the host does not."""
        parts = self._coming.wait()
        whole = parts[0].new_empty(self._shape)
        for box, part in zip(self._boxes, parts, strict=True):
            place = whole[tuple(slice(*span) for span in box)]
            place.copy_(part.view(place.shape))
        return whole


class Gathered:
    """Every rank that holds a part of the matrices gathers M and computes all of T."""

    def bring(self, b: TensorBucket, engine: TorchEngine) -> Brought:
        """M from all ranks."""
        failed = engine.begin_gathering(b)
        yield b.nbytes
        if failed is not None:
            raise failed
        M = engine.momentum(b)
        b.gather_carry()
        return M, b.carry()

    def send_back(self, b: TensorBucket, polar: Polar, left: MapState) -> SentBack:
        """T as it is: each rank takes its own part."""
        return polar, left
        yield
