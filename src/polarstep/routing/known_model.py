"""What an optimizer that :func:`polarstep.muon_for` made knows beyond a plain one: its model.

With this knowledge a step follows parameters that the model replaces, the routing table has rows for
parameters in no group, and parameters that are added later get the rules of ``muon_for``.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from polarstep.elementwise import AdamW
from polarstep.elementwise_rule import Elementwise
from polarstep.groups import Group
from polarstep.routing.choices import Choices
from polarstep.routing.following import Places
from polarstep.routing.route import Route
from polarstep.routing.routes import not_added

__all__ = ["KnownModel"]


@dataclass(frozen=True, eq=False)
class KnownModel:
    """What an optimizer knows of its model; with the defaults, what a plain optimizer knows."""

    places: Places | None = None
    """Where the parameters lie in the model; it does not keep the model alive."""
    choices: Choices | None = None
    """The arguments of ``muon_for``, for parameters of the model that are added later."""
    waiting: tuple[Group, ...] = ()
    """Groups of the parameters that were frozen, for when these are unfrozen and added."""
    left_out: tuple[Route, ...] = ()
    """Rows of the routing table for parameters in no group: frozen, or left out by a rule."""
    vectors: Elementwise = AdamW()  # noqa: RUF009 — frozen
    """The rule for vectors that are added later and are not in the model."""

    @property
    def model(self) -> nn.Module | None:
        """The model; ``None`` if it is gone or was never known."""
        return None if self.places is None else self.places.model

    def prepared(self, params: Sequence[Tensor]) -> list[Group]:
        """Groups for the ``params`` of the model, with the rules of ``muon_for`` for them.

        The groups of frozen parameters are among them, whether ``params`` has these or not.
        """
        waiting = list(self.waiting)
        known = {id(p) for group in waiting for _, p in group["params"]}
        model = self.model
        if model is None or self.choices is None:
            return waiting
        return waiting + self.choices.prepared(model, (p for p in params if id(p) not in known))

    def rows(self, groups: Sequence[Group]) -> tuple[Route, ...]:
        """Rows of the routing table for parameters that may be in none of the ``groups``."""
        if self.places is None and not self.waiting:  # from a pickle
            return not_added(self.left_out, groups)
        return self.left_out

    def without_rows(self, names: set[str | None]) -> KnownModel:
        """The same knowledge after the parameters called ``names`` were added."""
        return replace(self, left_out=tuple(row for row in self.left_out if row.name not in names))

    def pickled(self) -> KnownModel:
        """What a pickle of the optimizer holds: neither the model, nor the rules for its parameters."""
        return KnownModel(left_out=self.left_out, vectors=self.vectors)

    def for_copy(self, memo: dict[int, Any]) -> KnownModel:
        """What a deep copy holds; ``memo`` has everything that was copied before.

        The copy knows a model only if ``memo`` has it, as in ``deepcopy((model, optimizer))``, or where
        the model holds its optimizer.
        """
        known = KnownModel(
            waiting=deepcopy(self.waiting, memo),
            left_out=deepcopy(self.left_out, memo),
            vectors=deepcopy(self.vectors, memo),
        )
        places = None if self.places is None else self.places.copied(memo)
        if places is None:
            return known
        return replace(known, places=places, choices=deepcopy(self.choices, memo))
