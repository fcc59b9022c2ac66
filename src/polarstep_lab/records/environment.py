"""Where a run took place: versions, machine, device, commit."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from polarstep_lab.git import NoAnswer, git, tree_of
from polarstep_lab.optimizers.peers import versions
from polarstep_lab.settings_by_name import ConfigError
from polarstep_lab.storage import StorageError, read_json, write_json

__all__ = ["describe_environment", "pick_device", "record_environment", "source_of_packages"]

PACKAGES = ("polarstep", "torch", "numpy", "optuna", "tiktoken", "triton")


def pick_device(name: str) -> torch.device:
    """The device of that name; ``"auto"`` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"runtime.device={name!r}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"runtime.device={name!r}: torch finds no CUDA GPU here; use auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(
            f"runtime.device={name!r}: torch finds the GPUs cuda:0 to cuda:{last} here"
        )
    return device


def record_environment(
    path: Path,
    device: torch.device,
    data: Mapping[str, str | int] | None = None,
    processes: int = 1,
    parallel: str | None = None,
) -> None:
    """Write the environment of a new run; for a resumed run, append the present one to its list.

    ``data`` says what data the run reads (:class:`polarstep_lab.train.tasks.Task`), as a config may
    hold no more than a file pattern, and how many steps it has. ``parallel`` says how ``processes``
    share the model; for a single process it is None, and neither is noted.
    """
    now = describe_environment(device) | dict(data or {})
    if parallel is not None:
        now |= {"processes": processes, "parallel": parallel}
    if path.exists():
        first = read_json(path)
        resumed = first.get("resumed", []) if isinstance(first, dict) else None
        if not isinstance(resumed, list):
            raise StorageError(
                f"{path} is not the environment of a run (it holds {json.dumps(first)[:40]}), "
                "expected an object as a run writes it: delete the file, and the run goes on "
                "without what it said"
            )
        write_json(path, first | {"resumed": [*resumed, now]})
    else:
        write_json(path, now)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """What ``environment.json`` records."""
    return {
        "packages": {name: version for name in PACKAGES if (version := _version(name))}
        | versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": _device_name(device),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        **source_of_packages(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if package != "polarstep":
            return None
        import polarstep

        return polarstep.__version__


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with Path("/proc/cpuinfo").open() as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def source_of_packages() -> dict[str, str | None]:
    """The commit of both packages' source, with ``+`` where it has been changed since.

    Then ``git_tree`` is the hash of the source as it was, by which a later commit of it can be found.
    """
    package = Path(__file__).parents[2]

    try:
        commit = git(package, "rev-parse", "HEAD")
        changed = git(package, "status", "--porcelain", "--untracked-files=no", "--", str(package))
    except NoAnswer:
        return {"git_commit": None}
    if not changed:
        return {"git_commit": commit}
    try:
        return {"git_commit": f"{commit}+", "git_tree": tree_of(package)}
    except NoAnswer:
        return {"git_commit": f"{commit}+"}
