"""Muon: equation (1) of the paper, for every bucket of equally shaped matrices.

    C ← βC + G,   M = βC + G   (Nesterov)   or   M = C     engine.momentum
    T = transform(map(M))                                  b.map
    X ← (1 − ηλ)X − η·scale·T                              engine.update

:func:`bucket_step` is the step of one bucket, whatever its matrices are and wherever they lie. Three
objects answer what may differ:

    map        how T is made of M          polarstep.maps       full space, LowRank, Deflated, Auto
    exchange   which rank computes what    polarstep.ranks.exchange    Alone; polarstep.ranks has others
    engine     how C and X are touched     polarstep.engines     torch's operations, or kernels

:func:`buckets_of` finds the buckets of a step, and :func:`run` takes their steps in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Generator, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch

from polarstep.bucket import (
    Bucket,
    Draws,
    Engine,
    Member,
    PolarHook,
    BucketKey,
    TensorBucket,
    in_parts,
    members_of,
)
from polarstep.context import on_device
from polarstep.engines.fused import FUSED, FusedBucket
from polarstep.engines.replay import ReplayedStep
from polarstep.engines.torch import TorchEngine
from polarstep.ranks.exchange import ALONE, Exchange
from polarstep.ranks.gather import Gathered
from polarstep.ranks.layout import is_sharded
from polarstep.state import State
from polarstep.stepping.collect import Work
from polarstep.stepping.resting import let_rest

__all__ = ["Running", "at_once", "bucket_step", "buckets_of", "run", "steps_here", "steps_of"]

# Bytes that buckets may hold while they wait for other ranks; one bucket may always run.
WINDOW = 512 * 2**20
# Bytes of M in a bucket of gathered matrices; a larger bucket is processed in parts.
LARGEST_GATHERED = WINDOW // 2
# On a CPU parts of this size are as fast as larger batches, and need memory for a part of M only.
LARGEST_ON_A_CPU = 10 * 2**20


class Running(NamedTuple):
    """The step of a bucket, as far as it has come. It yields the bytes that it holds while it waits."""

    device: torch.device
    step: Generator[int, None, None]


def steps_here(
    works: list[Work],
    state: State,
    draws: Draws,
    hooks: tuple[PolarHook, ...],
    replayed: ReplayedStep,
) -> Iterator[Running]:
    """The steps of matrices that this rank has as a whole; those that kernels can update come first."""
    let_rest(works, state)
    updated = replayed(works, state, at_once, hooks)
    yield from steps_of(works, state, draws, hooks, skip=updated)


def steps_of(
    works: list[Work],
    state: State,
    draws: Draws,
    hooks: tuple[PolarHook, ...],
    skip: Container[int] = (),
) -> Iterator[Running]:
    """The steps by torch's operations; ``skip`` has the ids of parameters that are updated otherwise."""
    engine = TorchEngine()
    for b in buckets_of(works, state, draws, skip):
        exchange: Exchange = Gathered() if is_sharded(b.members[0].param) else ALONE
        yield Running(b.signature.device, bucket_step(b, engine, exchange, hooks))


def run(steps: Iterable[Running], errors: list[Exception] | None = None) -> None:
    """Take steps in turn: while one bucket waits for other ranks, the next computes.

    All ranks must come with the same steps in the same order. Where ``errors`` is given, an error goes
    there and ends the step of its bucket alone: other ranks would wait for this rank's part in the rest.
    """
    coming, running, more = iter(steps), deque[tuple[Running, int]](), True
    while more or running:
        try:
            if more and sum(held for _, held in running) < WINDOW:
                its = next(coming, None)
                more = its is not None
            else:
                its, _ = running.popleft()
            if its is not None:
                with on_device(its.device):
                    running.append((its, next(its.step)))
        except StopIteration:
            pass  # the bucket is done
        except Exception as error:
            if errors is None:
                raise
            errors.append(error)


def bucket_step(
    b: Bucket, engine: Engine, exchange: Exchange = ALONE, hooks: Iterable[PolarHook] = ()
) -> Generator[int, None, None]:
    """One bucket from G to X; yields wherever it waits for other ranks."""
    M, carry = yield from exchange.bring(b, engine)  # C ← βC + G, and M where it is computed
    polar, left = b.map.step_on_many(M, carry, b.draw(shown=bool(hooks)))  # T
    for hook in hooks:
        hook(b.observed(polar))
    polar, left = yield from exchange.send_back(b, polar, left)  # T where it is needed
    engine.update(b, polar)  # X ← (1 − ηλ)X − η·scale·T
    b.keep(left)


def at_once(b: FusedBucket, hooks: tuple[PolarHook, ...]) -> None:
    """Take the step of a bucket by kernels; on a GPU it launches them, and they may be captured."""
    with on_device(b.signature.device):
        for _ in bucket_step(b, FUSED, ALONE, hooks):
            raise AssertionError("no other rank has a part of this bucket")


def buckets_of(
    works: Iterable[Work], state: State, draws: Draws, skip: Container[int] = ()
) -> Iterator[TensorBucket]:
    """The matrices that go through one map as one batch, whichever groups and parameters they are in."""
    found: dict[tuple[BucketKey, bool], list[Member]] = {}
    for work in works:
        for index, p in enumerate(work.params):
            if p.numel() and id(p) not in skip:
                for signature, member in members_of(work, index, state):
                    # Nesterov and skipping are up to each parameter here, and not to its bucket.
                    key = replace(signature, nesterov=True, skips_nonfinite=False)
                    found.setdefault((key, is_sharded(p)), []).append(member)
    for (signature, sharded), members in found.items():
        numbers = cache(partial(draws.numbers, signature))  # the same for all parts
        nbytes = max(1, signature.m * signature.n * signature.dtype.itemsize)
        parts = iter([members])
        if sharded or signature.device.type == "cpu":
            most = (LARGEST_GATHERED if sharded else LARGEST_ON_A_CPU) // nbytes
            parts = in_parts(members, lambda member: member.count, most)
        for part in parts:
            yield TensorBucket(signature, part, state, numbers)
