"""Muon: equation (1) of the paper, for every bucket of equally shaped matrices.

    C ← βC + G,   M = βC + G   (Nesterov)   or   M = C     engine.momentum, called by exchange.bring
    T = transform(map(M))                                  b.map, which has the transform in it
    X ← (1 − ηλ)X − η·scale·T                              engine.update

The scale is the factor of the shape times the group's ``lr_factor``.

:func:`bucket_step` is the step of one bucket, whatever its matrices are and wherever they lie. Read it
first. Three objects answer what may differ:

    map        how T is made of M          polarstep.maps             full space, LowRank, Deflated
    exchange   which rank computes what    polarstep.ranks.exchange   Gathered, OverRanks; or Alone
    engine     how C and X are touched     polarstep.engines          torch's operations, or kernels

:func:`step` is a step of all matrices: :func:`buckets_of` finds the buckets, and :func:`run` takes their
steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from traceback import clear_frames
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polarstep import stale_momentum
from polarstep.bucket import (
    ALONE,
    Bucket,
    Draws,
    Engine,
    Exchange,
    PolarHook,
    TensorBucket,
    in_parts,
    members_by_key,
)
from polarstep.context import on_device
from polarstep.engines.fused import FUSED, FusedBucket
from polarstep.engines.replay import ReplayedStep
from polarstep.engines.torch import TorchEngine
from polarstep.gradients import Work
from polarstep.maps import Draw, MapState, Polar
from polarstep.maps.base import step_of
from polarstep.ranks.exchange import CannotSend, Gathered, Shares
from polarstep.state import State

__all__ = ["bucket_step", "buckets_of", "run", "step"]

# On a CPU parts of this size are as fast as larger batches, and need memory for a part of M only.
LARGEST_ON_A_CPU = 10 * 2**20


def bucket_step(
    b: Bucket, engine: Engine, exchange: Exchange = ALONE, hooks: Iterable[PolarHook] = ()
) -> Generator[int, None, None]:
    """One bucket from G to X; yields the bytes that it holds wherever it waits for other ranks."""
    try:
        M = yield from exchange.bring(b, engine)  # C ← βC + G, and M to the ranks that compute T
        T = exchange.computed(b, M, partial(polar_step, b, hooks))  # T = transform(map(M))
        T, left = yield from exchange.send_back(b, T)  # T to the ranks that update X
    except Exception as error:
        clear_frames(error.__traceback__)  # their tensors may have taken the last memory
        yield from exchange.send_zeros(b)  # other ranks wait for what this rank has not sent yet
        raise
    engine.update(b, T)  # X ← (1 − ηλ)X − η·scale·T
    b.keep(left)  # what the map leaves for the next step


def polar_step(
    b: Bucket, hooks: Iterable[PolarHook], M: Tensor, carry: MapState, draw: Draw
) -> tuple[Polar, MapState]:
    """T of M, and what the map leaves for the next step.

    ``carry`` is what the map left at the last step, ``draw`` has the random numbers of this step.
    """
    if hooks:
        draw = replace(draw, shown=True)  # the map then returns Captured, for hooks
    polar, left = step_of(b.map, M, carry, draw)
    for hook in hooks:
        hook(b.observed(polar))
    return polar, left


def step(
    works: list[Work],
    state: State,
    draws: Draws,
    replayed: ReplayedStep | None,
    hooks: tuple[PolarHook, ...] = (),
    shares: Shares | None = None,
) -> None:
    """Take the step of all matrices.

    A work is a parameter group with the gradients of this step. ``works`` and ``state`` have the
    matrices that this rank holds whole, ``shares`` those that it shares with other ranks. ``replayed``
    takes the steps of kernels; it is ``None`` where there are none, as on a CPU. An error in the step of
    a bucket is raised, or added to ``shares.errors``.
    """
    if any(work.captured or work.group["step"] % stale_momentum.EVERY == 0 for work in works):
        stale_momentum.stop(works, state, shares)
    engine = TorchEngine()  # one for all buckets, as a parameter may have blocks in several
    here = _steps_here(works, state, draws, replayed, hooks, engine)
    if shares is None:
        run(here)
    else:  # first what other ranks wait for
        shared = _steps_over_ranks(shares, draws, hooks, engine)
        run(chain(shared, here), shares.bytes_in_flight, shares.errors)


def _steps_over_ranks(
    shares: Shares, draws: Draws, hooks: tuple[PolarHook, ...], engine: TorchEngine
) -> Iterator[Running]:
    """The steps of the matrices that this rank shares with others."""
    for shared, exchange in shares.owned:
        yield Running(shared.key.device, bucket_step(shared, engine, exchange))
    for b in buckets_of(shares.gathered, shares.state, draws, most=shares.bytes_in_flight // 2):
        yield Running(b.key.device, bucket_step(b, engine, Gathered(), hooks))


def _steps_here(
    works: list[Work],
    state: State,
    draws: Draws,
    replayed: ReplayedStep | None,
    hooks: tuple[PolarHook, ...],
    engine: TorchEngine,
) -> Iterator[Running]:
    """The steps of the matrices that this rank holds whole; kernels take theirs at once."""
    updated: Container[int] = ()  # the ids of parameters
    if replayed is not None:
        updated = replayed(works, state, at_once, hooks)
    for b in buckets_of(works, state, draws, skip=updated):
        yield Running(b.key.device, bucket_step(b, engine, ALONE, hooks))


def at_once(b: FusedBucket, hooks: tuple[PolarHook, ...]) -> None:
    """Take the step of a bucket by kernels; on a GPU it launches them, and they may be captured."""
    with on_device(b.key.device):
        for _ in bucket_step(b, FUSED, ALONE, hooks):
            raise AssertionError("no other rank has a part of this bucket")


def buckets_of(
    works: Iterable[Work],
    state: State,
    draws: Draws,
    *,
    skip: Container[int] = (),
    most: int | None = None,
) -> Iterator[TensorBucket]:
    """The matrices that go through one map as one batch, in parts of at most ``most`` bytes.

    ``skip`` has the ids of parameters that are left out.
    """
    for (key, _), members in members_by_key(works, state, skip=skip).items():
        largest = LARGEST_ON_A_CPU if most is None and key.device.type == "cpu" else most
        parts: Iterable[list[Any]] = [members]
        if largest is not None:
            count = largest // max(1, key.m * key.n * key.dtype.itemsize)
            parts = in_parts(members, lambda member: member.count, count)
        numbers = draws.of(key)
        for part in parts:
            yield TensorBucket(key, part, state, numbers)


class Running(NamedTuple):
    """The step of a bucket, as far as it has come."""

    device: torch.device
    step: Generator[int, None, None]


def run(
    steps: Iterable[Running], bytes_in_flight: int = 1, errors: list[Exception] | None = None
) -> None:
    """Take steps in turn: while one bucket waits for other ranks, the next computes.

    The next bucket begins while those that wait hold less than ``bytes_in_flight``. All ranks must come
    with the same steps in the same order. Where ``errors`` is given, an error goes there and ends the
    step of its bucket alone: other ranks would wait for this rank's part in the rest.
    """
    coming, running, more = iter(steps), deque[tuple[Running, int]](), True
    while more or running:
        try:
            if more and sum(held for _, held in running) < bytes_in_flight:
                current = next(coming, None)
                more = current is not None
            else:
                current, _ = running.popleft()
            if current is not None:
                with on_device(current.device):
                    running.append((current, next(current.step)))
        except StopIteration:
            pass  # the bucket is done
        except Exception as error:
            if errors is None or isinstance(error, CannotSend):
                raise
            errors.append(error)
