"""What surrounds a step: autocast, TF32, the current GPU, inference mode and torch.compile.

:func:`numeric_context` keeps what a caller has set for its own arithmetic out of a step:

* Inside ``with torch.autocast(...)``, a step would multiply in bfloat16 where float32 is needed: the
  small matrices of a sketch, the polynomials, the bounds of a certificate.
* ``torch.set_float32_matmul_precision("high")`` rounds the factors of float32 products to the 10 bits of
  TF32, and ``"medium"`` to bfloat16 on some CPUs. Coefficients that float32 bears make infinities then.

:func:`on_device` chooses the GPU on which Triton launches a kernel, and :func:`in_a_graph` says whether
a launch is captured. :func:`inference_mode_off` is for
state tensors, which no later step could change if they were made inside ``torch.inference_mode()``.

:func:`constant` and :func:`not_compiled` are for functions that torch.compile must not trace. torch's
own decorators import ``torch._dynamo``, which takes as long as importing torch. :func:`user_stacklevel`
points a warning to the line of the user's own code. :func:`noting` is for what other ranks must not wait
for.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any, ClassVar, ParamSpec, TypeVar
from weakref import WeakSet

import torch

__all__ = [
    "constant",
    "in_a_graph",
    "inference_mode_off",
    "not_compiled",
    "noting",
    "numeric_context",
    "on_device",
    "user_stacklevel",
]

P = ParamSpec("P")
R = TypeVar("R")

# The kinds of devices that parameters lie on and that have autocast; the meta device, e.g., has none.
KINDS = ("cpu", "cuda", "mps", "xpu")
# The settings with which float32 products keep the digits of their factors.
WHOLE = ("ieee", "none")
_Settings = tuple[str | None, str, str]


def numeric_context(device: torch.device | None = None) -> AbstractContextManager[object]:
    """A context without autocast and TF32, and with ``device`` as the current GPU if it is a GPU.

    Without a device, autocast is off on every device, and the current GPU stays. While torch.compile
    traces, only autocast is turned off: a change of the other settings could not be traced.
    """
    if torch.compiler.is_compiling():
        return _autocast_off(device)
    return _numeric_context(device)


def on_device(device: torch.device | None) -> AbstractContextManager[object]:
    """A context in which ``device`` is the current GPU, as Triton's launches need it."""
    if device is None or device.type != "cuda" or torch.compiler.is_compiling():
        return nullcontext()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext()  # a fake tensor, on a machine that need not have a GPU
    return torch.cuda.device(device)


def in_a_graph() -> bool:
    """Whether kernels launched now are captured in a CUDA graph, for later replays, and not run."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


@contextmanager
def noting(errors: list[Exception] | None) -> Iterator[None]:
    """Put an error that is raised inside into ``errors``; ``None``: raise it.

    Where other ranks wait for this one, it goes on, and all ranks raise the error when the step ends.
    """
    try:
        yield
    except Exception as error:
        if errors is None:
            raise
        errors.append(error)


@contextmanager
def inference_mode_off() -> Iterator[None]:
    """A context that leaves ``torch.inference_mode()``, with gradients still off; else no change."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


@contextmanager
def _numeric_context(device: torch.device | None) -> Iterator[None]:
    with on_device(device), _autocast_off(device), _WholeFloat32():
        yield


def _autocast_off(device: torch.device | None) -> AbstractContextManager[object]:
    """A context in which autocast does nothing on ``device``; without a device, on any."""
    kinds = KINDS if device is None else (device.type,)
    on = [kind for kind in kinds if kind in KINDS and torch.is_autocast_enabled(kind)]
    if not on:
        return nullcontext()
    if len(on) == 1:  # torch.compile traces this case
        return torch.autocast(on[0], enabled=False)
    stack = ExitStack()
    for kind in on:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


class _WholeFloat32:
    """A block in which factors of float32 products keep all their digits.

    The settings are global, so blocks of several threads share one change: the first block that finds
    factors rounded turns this off, and the last block to end restores what was found. The model of
    another thread multiplies in whole float32 meanwhile, which is slower and not wrong.

    Ctrl-C can come between any two instructions, so a block may be left without a call of ``__exit__``.
    Blocks are therefore those that are alive, not a count: the next block to end restores the settings.
    """

    alive: ClassVar[WeakSet[_WholeFloat32]] = WeakSet()
    found: ClassVar[_Settings | None] = None
    lock: ClassVar = threading.Lock()

    def __enter__(self) -> None:
        shared = type(self)
        with self.lock:
            alone = not self.alive
            self.alive.add(self)
            if not _is_whole():
                shared.found = _settings() if alone else shared.found or _settings()
                try:
                    _turn_off(shared.found[0])
                except BaseException:
                    self.alive.discard(self)
                    if alone:
                        _restore(*shared.found)
                    raise

    def __exit__(self, *_: object) -> None:
        shared = type(self)
        with self.lock:
            self.alive.discard(self)
            if self.alive or shared.found is None:
                return
            try:
                if _is_whole():  # else somebody has made a setting since, which stays
                    _restore(*shared.found)
            except BaseException:
                _restore(*shared.found)
                raise
            shared.found = None


def _is_whole() -> bool:
    """Whether the digits of float32 factors are kept; "none" is torch's default, which keeps them."""
    # What torch.backends.cuda.matmul.fp32_precision reads, in a tenth of the time. torch may rename it.
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:
        return all(backend.fp32_precision in WHOLE for backend in _backends())
    return read("cuda", "matmul") in WHOLE and read("mkldnn", "matmul") in WHOLE


def _settings() -> _Settings:
    """The settings now: the older of torch's settings, and the newer ones of GPUs and of CPUs."""
    cuda, mkldnn = _backends()
    return _older(), cuda.fp32_precision, mkldnn.fp32_precision


def _turn_off(older: str | None) -> None:
    """Keep all digits from now on; ``older`` is the older setting as it was found.

    torch has an older setting for all devices and a newer one for each kind of device. Each is read on
    the other's behalf, and the older one raises an error if the two do not agree. So the older one is
    changed only where it has been used alone.
    """
    if older is not None:
        torch.set_float32_matmul_precision("highest")
    cuda, mkldnn = _backends()
    cuda.fp32_precision = mkldnn.fp32_precision = "ieee"


def _restore(older: str | None, *newer: str) -> None:
    if older is not None:
        torch.set_float32_matmul_precision(older)
    for backend, found in zip(_backends(), newer, strict=True):
        # "none" follows torch.backends.fp32_precision, and reads as what that is set to.
        backend.fp32_precision = "none"
        if backend.fp32_precision != found:
            backend.fp32_precision = found


def _backends() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _older() -> str | None:
    """The older of torch's settings; ``None`` where the newer one contradicts it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns whoever reads the older setting
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:
            return None


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Have torch.compile call ``function`` while tracing, on Python numbers, and keep the result."""
    # All that torch.compiler.assume_constant_result does.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def not_compiled(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Exclude a function from torch.compile; ``reason`` appears in the fullgraph=True error."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def excluded(*args: P.args, **kwargs: P.kwargs) -> R:
            run: Callable[P, R]
            run = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
            return run(*args, **kwargs)

        # What torch.compiler.disable sets for the error message.
        excluded._torchdynamo_disable = True  # type: ignore[attr-defined]
        excluded._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return excluded

    return decorate


def user_stacklevel() -> int:
    """The ``stacklevel`` with which a warning shows the first line outside of this package and torch.

    The number differs from call to call: torch wraps ``step()`` twice, and once more if the optimizer
    has a scheduler.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours_or_torchs(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours_or_torchs(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("polarstep", "torch")
