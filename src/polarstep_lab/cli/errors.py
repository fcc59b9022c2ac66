"""What goes wrong in commands: one line that says what to do instead of a traceback, and a status.

The status is 0 for success, 1 for an error, 3 for a loss that is no longer finite, and 130 for an
interruption by Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from polarstep_lab.data.corpus import TextError
from polarstep_lab.data.tokenizer import VocabularyError
from polarstep_lab.jobs.local import EXPLAINED
from polarstep_lab.storage import StorageError
from polarstep_lab.train.ranks import first_failure
from polarstep_lab.train.run import Interrupted

__all__ = ["AGAIN", "DIVERGED", "ERROR", "INTERRUPTED", "REPORT", "clear_errors", "need"]

ERROR = 1
DIVERGED = 3
INTERRUPTED = 130

EXPECTED = (*EXPLAINED, TextError, VocabularyError, OSError)

AGAIN = "Run the same command again to go on."

REPORT = ("jinja2", "matplotlib", "pandas", "scipy")
"""The packages that a report needs."""


def need(what: str, *packages: str) -> None:
    """Raise an error with the command to install, if a package that ``what`` needs is missing.

    Asked before a command starts, so that no work is lost for want of a package.

    >>> need("counting", "collections", "a_package_of_nobody")
    Traceback (most recent call last):
    polarstep_lab.storage.StorageError: counting needs 'a_package_of_nobody', which is not installed: ...
    """
    for package in packages:
        if find_spec(package) is None:
            raise StorageError(
                f"{what} needs {package!r}, which is not installed: "
                "pip install 'polarstep[experiments]'"
            )


@contextmanager
def clear_errors(how_to_go_on: str) -> Iterator[None]:
    """Turn expected errors into a message and an exit status.

    ``how_to_go_on`` is appended to the message of an interruption. Of several ranks, the first that
    fails prints its message, and the others print nothing.
    """
    console = Console(stderr=True)

    def fail(error: BaseException, message: str, status: int) -> typer.Exit:
        if first_failure(error)[0]:
            console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
        return typer.Exit(status)

    try:
        yield
    except Interrupted as stopped:
        raise fail(stopped, f"{stopped}. {how_to_go_on}", INTERRUPTED) from None
    except KeyboardInterrupt as stopped:
        raise fail(stopped, f"Stopped. {how_to_go_on}", INTERRUPTED) from None
    except torch.cuda.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        remedy = (
            "lower --set runtime.micro_batch=N (sequences per forward pass) and evaluation.batch"
        )
        raise fail(error, f"error: {first} To fit, {remedy}. {how_to_go_on}", ERROR) from None
    except EXPECTED as error:
        raise fail(error, f"error: {error}", ERROR) from None
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        if not first_failure(error)[0]:
            raise typer.Exit(ERROR) from None
        if not _lost_contact(error):
            raise
        first = str(error).strip().splitlines()[0]
        cause = f"error: another process of this run has gone without a message ({first})"
        remedy = f"it was killed, perhaps for lack of memory. {how_to_go_on}"
        raise fail(error, f"{cause}: {remedy}", ERROR) from None


def _lost_contact(error: RuntimeError) -> bool:
    """Whether torch reports that another rank does not answer any more."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
