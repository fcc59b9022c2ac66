"""Checkpoints: everything a run needs to go on as if it had never been interrupted.

Data, schedules and sketches are functions of the seed and the step, so a checkpoint holds the
weights, the optimizer's state, the step, the time spent, and how long the logs were.

A checkpoint holds whole tensors, whatever the number of ranks: a run of two ranks goes on with one or
with four. Sharded tensors are gathered when it is written and sharded anew when it is read.

A checkpoint is a file of ``torch.save`` followed by the SHA-256 of its bytes, which ``torch.load``
does not read. The checkpoint before the newest is kept: a run whose newest checkpoint was damaged
on disk goes on from there, with the same numbers.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polarstep.ranks.layout import is_sharded, whole
from polarstep_lab.records.record import CHECKPOINT, PREVIOUS_CHECKPOINT
from polarstep_lab.storage import StorageError, write_atomically
from polarstep_lab.train.ranks import Ranks

__all__ = ["DamagedCheckpoint", "RunProgress", "load_checkpoint", "resume_from", "save_checkpoint"]

VERSION = 1
_ENTRIES = {"version": int, "progress": dict, "config": dict, "model": dict, "optimizer": dict}
_LABEL = b"\npolarstep sha256 "
_TRAILER = len(_LABEL) + 2 * hashlib.sha256().digest_size


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come: steps done, seconds spent, and the logs' lengths in bytes."""

    step: int = 0
    seconds: float = 0.0
    metrics_bytes: int = 0
    gamma_bytes: int = 0
    noise_bytes: int = 0


class DamagedCheckpoint(StorageError):
    """A checkpoint cannot be read, or differs from what was written."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{path} cannot be read ({fault}); start the run anew with --force")
        self.path, self.fault = path, fault

    def __reduce__(self) -> tuple[type[DamagedCheckpoint], tuple[Path, str]]:
        return DamagedCheckpoint, (self.path, self.fault)


# --- writing ------------------------------------------------------------------------------------


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    progress: RunProgress,
    config: dict[str, Any],
    ranks: Ranks | None = None,
) -> None:
    """Write a checkpoint of the present state to ``path``; the one that was there is kept.

    All ranks call it, rank 0 writes, and the others wait until the checkpoint is on disk.
    """
    ranks = ranks or Ranks()
    content = {
        "version": VERSION,
        "progress": progress.__dict__,
        "config": config,
        "model": _whole(model.state_dict(), ranks),
        "optimizer": _whole(optimizer.state_dict(), ranks),
    }

    def write(file: IO[bytes]) -> None:
        summed = _Summed(file)
        torch.save(content, cast(IO[bytes], summed))
        file.write(_LABEL + summed.sum.hexdigest().encode())

    ranks.on_rank_zero(
        lambda: write_atomically(path, write, keep=path.with_name(PREVIOUS_CHECKPOINT))
    )


def _whole(state: Any, ranks: Ranks) -> Any:
    """``state`` with sharded tensors gathered, one after another; rank 0 alone keeps them."""
    if ranks.parallel != "fsdp":
        return state
    if isinstance(state, dict):
        return {key: _whole(value, ranks) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_whole(value, ranks) for value in state)
    if not is_sharded(state):
        return state
    found = whole(state)
    return found.cpu() if ranks.first else None


class _Summed:
    """The part of a file that ``torch.save`` uses, with the checksum of what went through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sum = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sum.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


# --- reading ------------------------------------------------------------------------------------


def resume_from(
    directory: Path,
    model: nn.Module,
    optimizer: Optimizer,
    config: dict[str, Any],
    device: torch.device,
    notify: Callable[[str], object],
    ranks: Ranks | None = None,
) -> RunProgress:
    """Put the newest good checkpoint of ``directory`` into ``model`` and ``optimizer``.

    Without a checkpoint both stay as they are and the run begins at step 0. ``notify`` is called
    with what a user should know: that there is no checkpoint, or that the newest is damaged.
    All ranks call it; rank 0 reads the files.
    """
    ranks = ranks or Ranks()
    newest, previous = directory / CHECKPOINT, directory / PREVIOUS_CHECKPOINT
    has_newest, has_previous = ranks.on_rank_zero(lambda: (newest.exists(), previous.exists()))
    if not has_newest and not has_previous:
        notify(f"{directory} has no checkpoint yet: the run starts again at step 0")
        return RunProgress()
    if not has_newest:  # a kill came between the two renames of a save
        return load_checkpoint(previous, model, optimizer, config, device, ranks)
    try:
        return load_checkpoint(newest, model, optimizer, config, device, ranks)
    except DamagedCheckpoint as damaged:
        if not has_previous:
            raise
        try:
            progress = load_checkpoint(previous, model, optimizer, config, device, ranks)
        except DamagedCheckpoint as other:
            raise StorageError(
                f"neither {newest} ({damaged.fault}) nor {previous} ({other.fault}) can be read: "
                "start the run anew with --force"
            ) from other
        notify(
            f"{newest} is damaged ({damaged.fault}): the run goes on from the checkpoint before, "
            f"after step {progress.step}"
        )
        # The next save must not keep the damaged one.
        ranks.on_rank_zero(lambda: os.replace(previous, newest))
        return progress


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    config: dict[str, Any],
    device: torch.device,
    ranks: Ranks | None = None,
) -> RunProgress:
    """Put the state of ``path`` into ``model`` and ``optimizer``; refuse another run's."""
    ranks = ranks or Ranks()
    held_by = device if ranks.count == 1 else torch.device("cpu")
    content = ranks.on_rank_zero(lambda: _read(path, held_by))
    if content["version"] != VERSION:
        raise StorageError(
            f"{path} has version {content['version']}, expected {VERSION}: resume it with the "
            "version of polarstep that wrote it, or start anew with --force"
        )
    if content["config"] != config:
        changed = ", ".join(sorted(_differences(content["config"], config)))
        raise StorageError(
            f"{path} belongs to a run with another config ({changed} differ): resume with the "
            "settings it was started with, or start anew in another directory"
        )
    progress = _progress(path, content["progress"])
    try:
        if ranks.parallel == "fsdp":
            _shard(content, model, optimizer)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    except torch.cuda.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        fault = f"its state does not fit the model: {_first_line(error)}"
        raise DamagedCheckpoint(path, fault) from error
    return progress


def _shard(content: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Shard the whole tensors of a checkpoint as the parameters they belong to are sharded."""
    own = model.state_dict()
    content["model"] = {
        name: _placed_like(own.get(name), value) for name, value in content["model"].items()
    }
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, state in content["optimizer"]["state"].items():
        for name, value in state.items():
            state[name] = _placed_like(params[number], value)


def _placed_like(p: Tensor | None, value: Any) -> Any:
    """``value`` sharded as ``p`` is, if it has the shape of ``p``; else ``value`` itself.

    Every rank has all of ``value`` and keeps its own part, so that nothing is sent.
    """
    if not is_sharded(p) or not isinstance(value, Tensor) or value.shape != p.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # takes a second, and few runs need it

    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    """The content of a checkpoint, its checksum verified and its entries present."""
    try:
        _verify(path)
        content = torch.load(path, map_location=device, weights_only=True)
    except (StorageError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error}): see to it that this user may read it and that its "
            "disk works, then resume again"
        ) from error
    except Exception as error:  # torch may raise anything where bytes of a file have changed
        # Of weights_only's own error, only the name: its text advises to load the file unchecked.
        text = "" if isinstance(error, pickle.UnpicklingError) else _first_line(error)
        fault = f"torch.load raises {type(error).__name__}" + (f": {text}" if text else "")
        raise DamagedCheckpoint(path, fault) from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(path, f"it holds a {type(content).__name__}, expected a dict")
    for name, kind in _ENTRIES.items():
        if not isinstance(content.get(name), kind):
            found = type(content[name]).__name__ if name in content else "nothing"
            raise DamagedCheckpoint(path, f"{name} is {found}, expected {kind.__name__}")
    return content


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _verify(path: Path) -> None:
    """Raise where a checkpoint is not what its checksum was made of."""
    with path.open("rb") as file:
        length = max(0, file.seek(0, os.SEEK_END) - _TRAILER)
        file.seek(length)
        trailer = file.read()
        if not trailer.startswith(_LABEL):
            raise DamagedCheckpoint(path, "its end is missing")
        file.seek(0)
        found = hashlib.sha256()
        while length and (block := file.read(min(length, 1 << 20))):
            found.update(block)
            length -= len(block)
    if found.hexdigest().encode() != trailer.removeprefix(_LABEL):
        raise DamagedCheckpoint(path, "its SHA-256 is not the one it was written with")


def _progress(path: Path, raw: dict[str, Any]) -> RunProgress:
    """Check the progress in a checkpoint."""
    names = [field.name for field in fields(RunProgress)]
    if raw.keys() != set(names):
        raise DamagedCheckpoint(path, f"progress={raw!r}, expected {', '.join(names)}")
    for name, value in raw.items():
        kinds = (int, float) if name == "seconds" else (int,)
        if type(value) not in kinds or not math.isfinite(value) or value < 0:
            raise DamagedCheckpoint(path, f"progress.{name}={value!r}, expected 0 or more")
    return RunProgress(**raw)


def _differences(a: Any, b: Any, path: str = "") -> list[str]:
    """The leaves at which two trees of plain data differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            difference
            for key in a.keys() | b.keys()
            for difference in _differences(a.get(key), b.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if a == b else [path]
