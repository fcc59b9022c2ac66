"""Parameters that FSDP2 has sharded over one rank take the step of plain ones, at the same cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ranks.launch import Ranks, needs_gloo
from tests.ranks.twins import WARM, Twins
from torch.distributed.tensor import DTensor, Shard

pytestmark = needs_gloo
SHAPES = ((12, 20), (12, 20), (16, 9))
MAPS: dict[str, dict[str, Any]] = {
    "full space": {},
    "warm": {"polar": WARM},
    "8 bits": {"momentum_dtype": torch.int8},
}


@pytest.fixture(scope="module")
def one(ranks_of) -> Ranks:
    return ranks_of(1)


def twins_of(name: str) -> Twins:
    return Twins(SHAPES, Shard(0), **MAPS[name])


def dispatched(name: str) -> tuple[list[str], float]:
    """What the third step asks of its ``DTensor`` objects, and how far it is off."""
    twins, asked = twins_of(name), []
    twins.step()
    twins.step()
    step, dispatch, to_local = twins.ours.step, DTensor.__torch_dispatch__, DTensor.to_local

    def noted(kind: Any, func: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(str(func))
        return dispatch(func, *arguments, **options)

    def noting() -> None:
        DTensor.__torch_dispatch__ = classmethod(noted)  # type: ignore[method-assign, assignment]
        DTensor.to_local = lambda X, **_: asked.append("to_local") or to_local(X)  # type: ignore[method-assign, func-returns-value]
        try:
            step()
        finally:
            DTensor.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
            DTensor.to_local = to_local  # type: ignore[method-assign]

    twins.ours.step = noting  # type: ignore[method-assign, assignment]
    twins.step()
    return asked, twins.off_of_values()


@pytest.mark.parametrize("name", MAPS)
def test_a_step_asks_nothing_of_a_dtensor(name, one) -> None:
    """Every operation on a DTensor takes some ten microseconds of Python."""
    assert one(dispatched, name) == [([], 0.0)]


def changed(what: str) -> tuple[float, bool]:
    """How far the twins are apart when the state of both was changed from outside between steps."""
    twins = twins_of("warm")
    twins.step()
    twins.step()
    for p, q in zip(twins.params[:2], twins.twins[:2], strict=True):
        both = twins.ours.state[p], twins.one.state[q]
        for its in both:
            if what == "momentum":
                its["momentum_buffer"] = 2 - its["momentum_buffer"]
            elif what == "carry":
                del its["basis"]
        if what == "everything":
            twins.ours.state[p], twins.one.state[q] = {}, {}
        elif what == "memory":
            p._local_tensor = p._local_tensor.clone()
    twins.step()
    first = twins.off_of_values()
    twins.step(absent={0} if what == "gradient" else ())
    twins.step()
    last = twins.ours.state[twins.params[2]]["momentum_buffer"]
    return max(first, twins.off_of_values()), isinstance(last, DTensor)


@pytest.mark.parametrize(
    "what", ["nothing", "momentum", "carry", "everything", "memory", "gradient"]
)
def test_a_state_that_was_changed_from_outside_is_taken_over(what, one) -> None:
    assert one(changed, what) == [(0.0, True)]
