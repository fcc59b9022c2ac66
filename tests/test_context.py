"""What surrounds a step: autocast, TF32, the current GPU, inference mode, torch.compile, warnings.

What a caller has set for its own arithmetic changes nothing in a step, a map or a certificate.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from tests.solvers import over_solvers
from tests.spectra import gaussian, matrix
from torch import nn

import polarstep as ps
from polarstep import context as surroundings
from polarstep import muon, muon_for
from polarstep.certificate import certified, cheap_certificate
from polarstep.context import (
    constant,
    inference_mode_off,
    not_compiled,
    numeric_context,
    on_device,
    user_stacklevel,
)
from polarstep.engines import fused
from polarstep.engines import replay as replaying
from polarstep.engines.replay_plan import ReplayPlan
from polarstep.gradients import collect

Settings = tuple[str, ...]


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def settings() -> Settings:
    """All that torch says of the precision of float32 products."""
    found = [torch.backends.fp32_precision]
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        found.append(backend.fp32_precision)
    for read in (
        torch.get_float32_matmul_precision,
        lambda: str(torch.backends.cuda.matmul.allow_tf32),
    ):
        try:
            found.append(read())
        except RuntimeError:  # the two settings contradict one another
            found.append("contradiction")
    return tuple(found)


def older(precision: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(precision)


def older_for_cuda() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def newer_for_cuda() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def newer_for_cpus() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def newer_for_all() -> None:
    torch.backends.fp32_precision = "tf32"


def one_of_each() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"


ROUNDED = {
    "high": older("high"),
    "medium": older("medium"),
    "allow_tf32": older_for_cuda,
    "cuda.matmul": newer_for_cuda,
    "mkldnn.matmul": newer_for_cpus,
    "all": newer_for_all,
    "one of each": one_of_each,
}
WHOLE = {"ieee", "none"}

over_settings = pytest.mark.parametrize("setting", ROUNDED.values(), ids=list(ROUNDED))


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    """torch's settings as they are in a new process, before each test and after it."""

    def anew() -> None:
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = "none"
        for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            backend.fp32_precision = "none"

    anew()
    yield
    anew()


# Autocast.


@over_solvers()
def test_a_map_keeps_its_precision(solver):
    M = matrix("power-law", 24, 40).float()
    expected = solver.map(M)
    with autocast():
        assert torch.equal(solver.map(M), expected)


@over_solvers()
def test_a_step_keeps_its_precision(solver):
    ends = []
    for context in (autocast(), numeric_context()):
        W = nn.Parameter(gaussian(24, 40, seed=1).float())
        optimizer = ps.Muon([W], lr=0.1, polar=solver.map)
        with context:
            for step in range(3):
                W.grad = 0.01 * gaussian(24, 40, seed=step + 2).float()
                optimizer.step()
        ends.append(W.detach())
    assert torch.equal(*ends)


def test_a_closure_keeps_the_callers_autocast():
    W = nn.Parameter(gaussian(8, 8).float())
    optimizer, seen = ps.Muon([W]), []

    def closure():
        product = W @ W
        seen.append(product.dtype)
        product.float().square().sum().backward()
        return 0.0

    with autocast():
        optimizer.step(closure)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [torch.bfloat16]


def test_a_certificate_keeps_its_precision():
    polar, M = ps.LowRank(8, 4, always_sketch=True), matrix("power-law", 60, 64).float()
    T, bound = certified(polar, M)
    plain = cheap_certificate(M, T)
    with autocast():
        again, bound_again = certified(polar, M)
        plain_again = cheap_certificate(M, T)
    assert torch.equal(T, again)
    assert (bound.worst, plain.worst) == (bound_again.worst, plain_again.worst)


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_autocast_is_off_on_the_device_alone(kind):
    device = torch.device(kind)
    with autocast(), numeric_context(device):
        assert torch.is_autocast_enabled("cpu") == (kind == "meta")
    with numeric_context(device):
        assert not torch.is_autocast_enabled("cpu")


def test_without_a_device_autocast_is_off_on_all():
    with autocast(), torch.autocast("xpu", torch.bfloat16), numeric_context():
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("xpu")


# TF32 on a GPU, bfloat16 on a CPU with products in bfloat16.


class Looking(ps.NewtonSchulz):
    """A map that notes torch's settings at its products."""

    seen: ClassVar[list[Settings]] = []

    def step(self, M, carry, draw):
        self.seen.append(settings())
        return super().step(M, carry, draw)


def at_the_products(run: Callable[[ps.PolarMap], object]) -> Settings:
    """torch's settings at the products of a map that ``run`` runs."""
    Looking.seen.clear()
    run(Looking(2, "quintic"))
    (found, *others) = Looking.seen
    assert all(other == found for other in others)
    return found


def step_of(polar: ps.PolarMap) -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    optimizer = muon_for(model, polar=polar)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()


RUNS = {
    "call": lambda polar: polar(matrix("power-law", 8, 12).float()),
    "certified": lambda polar: certified(polar, matrix("power-law", 8, 12).float()),
    "step": step_of,
}


@over_settings
@pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))
def test_products_have_all_digits_and_the_setting_comes_back(run, setting):
    setting()
    before = settings()
    of_cuda, of_cpus = at_the_products(run)[1:3]
    assert {of_cuda, of_cpus} <= WHOLE
    assert settings() == before


@over_settings
def test_the_settings_agree_within_a_step_where_they_did_before(setting):
    """A function that torch.compile compiled reads both, and torch 2.9 raises if they contradict."""
    setting()
    before = settings()
    within = at_the_products(RUNS["call"])
    assert ("contradiction" in within) <= ("contradiction" in before)


@pytest.mark.parametrize(("precision", "whole"), [("ieee", True), ("none", True), ("tf32", False)])
def test_the_settings_are_read_without_torchs_own_getter_too(precision, whole, monkeypatch):
    """It has no public name, and a later torch may not have it."""
    found = SimpleNamespace(fp32_precision=precision), SimpleNamespace(fp32_precision="ieee")
    monkeypatch.setattr(surroundings, "_backends", lambda: found)
    monkeypatch.delattr(torch._C, "_get_fp32_precision_getter")
    assert surroundings._is_whole() is whole


@over_settings
def test_an_error_restores_the_setting(setting):
    setting()
    before = settings()
    found = []

    def fail() -> None:
        with numeric_context():
            found.append(settings())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert found[0][1:3] != before[1:3]
    assert settings() == before


def test_a_setting_that_follows_the_general_one_goes_on_following_it():
    torch.backends.fp32_precision = "tf32"
    with numeric_context():
        pass
    torch.backends.fp32_precision = "none"
    assert torch.backends.cuda.matmul.fp32_precision == "none"


def test_a_setting_made_inside_stays():
    torch.set_float32_matmul_precision("high")
    with numeric_context():
        torch.set_float32_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == "medium"


def test_a_setting_made_inside_holds_until_the_next_block():
    with numeric_context():
        torch.set_float32_matmul_precision("high")
        with numeric_context():
            assert settings()[1] in WHOLE
    assert torch.get_float32_matmul_precision() == "high"


def test_the_last_of_several_threads_restores_the_setting():
    """Steps in two threads overlap; the first to end must leave the other's products as they are."""
    torch.set_float32_matmul_precision("high")
    before = settings()
    inside, may_end = threading.Event(), threading.Event()
    found = []

    def longer() -> None:
        with numeric_context():
            inside.set()
            may_end.wait(30)
            found.append(settings())

    thread = threading.Thread(target=longer)
    with numeric_context():
        thread.start()
        inside.wait(30)
    may_end.set()
    thread.join()
    assert found[0][1] in WHOLE
    assert settings() == before


def interrupted_at(number: int) -> bool:
    """Whether Ctrl-C came at the ``number``-th place of the switch at which Python looks for signals.

    Python does so where a function begins and where a call has ended.
    """
    left = number

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        looks = frame if event in ("call", "c_return") else frame.f_back
        if event == "c_call" or looks is None:
            return
        if looks.f_code.co_filename == surroundings.__file__:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        with numeric_context():
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@over_settings
def test_the_setting_comes_back_after_ctrl_c_anywhere(setting):
    """At once, or, where Ctrl-C came outside of every ``try``, after the next step."""
    setting()
    before, at_once = settings(), []
    for number in itertools.count(1):
        if not interrupted_at(number):
            break
        at_once.append(settings() == before)
        with numeric_context():
            assert {*settings()[1:3]} <= WHOLE
        assert settings() == before, number
    assert len(at_once) > 20
    assert sum(at_once) > 0.8 * len(at_once)


@over_solvers()
def test_medium_precision_changes_no_digit(solver):
    """On a CPU that multiplies in bfloat16, "medium" changes the products of everything else."""
    M = matrix("power-law", 24, 40).float()
    expected = solver.map(M)
    torch.set_float32_matmul_precision("medium")
    assert torch.equal(solver.map(M), expected)


def test_a_closure_keeps_the_callers_setting():
    W = nn.Parameter(gaussian(8, 8).float())
    optimizer, seen = ps.Muon([W]), []
    torch.set_float32_matmul_precision("high")

    def closure():
        seen.append(torch.get_float32_matmul_precision())
        W.square().sum().backward()
        return 0.0

    optimizer.step(closure)
    assert seen == ["high"]


def test_a_traced_map_leaves_the_setting_alone():
    torch.compiler.reset()
    M = matrix("power-law", 8, 12).float()
    polar = ps.NewtonSchulz(2, "quintic")
    torch.set_float32_matmul_precision("high")
    compiled = torch.compile(polar, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(M), polar(M), atol=1e-5)
    assert torch.get_float32_matmul_precision() == "high"


# The current GPU.


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current GPU, last of the GPUs that are entered, on a machine that need not have any."""
    current = [0]

    @contextmanager
    def device(of: torch.device) -> Iterator[None]:
        current.append(of.index)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", device)
    return current


class OnSecond(torch.Tensor):
    """A tensor that says that it is on the second GPU, where a kernel would find it."""

    device = torch.device("cuda", 1)
    is_cuda = True


def test_a_context_enters_the_gpu(entered):
    for context in (on_device, numeric_context):
        with context(torch.device("cuda", 1)):
            assert entered == [0, 1]
        with context(torch.device("cpu")):
            assert entered == [0]
    with on_device(None), numeric_context():
        assert entered == [0]


def test_a_fake_tensor_needs_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with on_device(torch.device("cuda", 1)):
        pass


def test_a_step_runs_on_the_gpu_of_its_parameters(entered, monkeypatch):
    W = nn.Parameter(gaussian(8, 12).float())
    optimizer, seen = ps.Muon([W]), []
    monkeypatch.setattr(optimizer, "_first_gpu", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(optimizer, "_update_groups", lambda captured: seen.extend(entered))
    optimizer.step()
    assert seen == [0, 1]


def test_the_first_parameter_on_a_gpu_decides(entered):
    plain, second = gaussian(8, 12).float(), gaussian(8, 12).float().as_subclass(OnSecond)
    optimizer = ps.Muon([nn.Parameter(plain)])
    assert optimizer._first_gpu() is None
    optimizer.param_groups[0]["params"].append(second)
    assert optimizer._first_gpu() == OnSecond.device


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("hooked", [False, True])
def test_each_bucket_runs_on_its_own_gpu(entered, monkeypatch, count, hooked):
    """A plan with buckets on two GPUs, neither of which is the current one."""
    launched, looked = [], []
    M = gaussian(1, 4, 6)

    def momentum(engine, bucket):
        launched.append((bucket.key.device.index, entered[-1]))
        return M

    monkeypatch.setattr(fused.FusedEngine, "momentum", momentum)
    monkeypatch.setattr(fused.FusedEngine, "update", lambda *_: None)
    monkeypatch.setattr(replaying, "gradients", lambda *_: ([], []))
    monkeypatch.setattr(replaying, "fill_tables", lambda *_: None)
    monkeypatch.setattr(fused.FusedBucket, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: on_device(None))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream())
    optimizer = ps.Muon([nn.Parameter(gaussian(4, 6).float())])
    optimizer.param_groups[0]["params"][0].grad = gaussian(4, 6).float()
    work = [collect(optimizer.param_groups[0])]
    ((key, member),) = replaying.members_of(work[0], 0, optimizer.state)
    runs = []
    for index in (1, 2):
        for _ in range(count):
            bucket = fused.FusedBucket(key, [member])
            bucket.key = replace(key, device=torch.device("cuda", index))
            runs.append(bucket)
    plan = ReplayPlan((), [[0]], runs, [0] * len(runs), work[0].params)
    hooks = (lambda bucket: looked.append(entered[-1]),) if hooked else ()
    replaying.ReplayedStep()._run(plan, work, optimizer.state, muon.at_once, hooks)
    assert launched == [(index, index) for index in (1, 2) for _ in range(count)]
    assert looked == ([1] * count + [2] * count if hooked else [])


class Stream:
    """A stream that nothing runs on."""

    def wait_stream(self, other: Stream) -> None:
        """Do nothing."""


# torch.inference_mode.


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_tensors_are_ordinary_and_the_gradients_as_the_caller_has_them(around):
    with around():
        given = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with inference_mode_off():
            made = torch.zeros(3)
            assert not torch.is_inference_mode_enabled()
            assert torch.is_grad_enabled() == (around is torch.enable_grad)
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == given
    assert not made.is_inference()
    made.requires_grad_().sum().backward()  # refused for a tensor of inference mode


WARN = "def warn(): warnings.warn('a mistake', stacklevel=user_stacklevel())"
CALL = "def call(inner): return inner()"


def made(source: str, module: str):
    """The function that ``source`` defines, as one of ``module``."""
    names = {"__name__": module, "warnings": warnings, "user_stacklevel": user_stacklevel}
    exec(compile(source, f"{module}.py", "exec"), names)
    return names[source.split()[1].partition("(")[0]]


@pytest.mark.parametrize(
    "through",
    [
        [],
        ["polarstep"],
        ["torch.optim.optimizer"],
        ["polarstep.optimizer", "torch.optim", "torch"],
    ],
    ids=str,
)
def test_the_line_outside_the_package_and_torch_is_shown(through):
    step = made(WARN, "polarstep.engines.graphs")
    for module in through:
        step = partial(made(CALL, module), step)
    with pytest.warns(UserWarning, match="a mistake") as told:
        step()
    assert told[0].filename == __file__


@pytest.mark.parametrize("module", ["polarstep_lab.training", "torchvision.models", "users"])
def test_a_package_of_a_similar_name_is_the_users(module):
    step = made(WARN, "polarstep.engines.graphs")
    call = made(CALL, module)
    with pytest.warns(UserWarning, match="a mistake") as told:
        call(step)
    assert told[0].filename == f"{module}.py"


def test_without_a_line_of_the_users_it_is_the_outermost(monkeypatch):
    frame = None
    for name in ("polarstep", "torch._dynamo", "polarstep.engines.graphs"):
        frame = SimpleNamespace(f_back=frame, f_globals={"__name__": name})
    monkeypatch.setattr("sys._getframe", lambda depth: frame)
    assert user_stacklevel() == 3


def test_importing_the_package_leaves_the_compiler_alone():
    code = "import sys, polarstep; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_constant_sets_what_torch_sets():
    def ours():
        return 1

    def theirs():
        return 1

    torch.compiler.assume_constant_result(theirs)
    assert vars(constant(ours)) == vars(theirs) != {}


def test_a_constant_function_is_called_not_traced():
    calls = []

    @constant
    def numbers(n: int) -> float:
        calls.append(Path(__file__).stat())  # a full graph has no place for a look at the disk
        return float(n)

    step = torch.compile(lambda x: x * numbers(3), fullgraph=True, backend="eager")
    for _ in range(3):
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 3.0))
    assert len(calls) == 1


class Counter:
    """Counts its steps in a function that torch.compile is told to leave alone."""

    def __init__(self) -> None:
        self.steps = 0
        self.traced: list[bool] = []

    @not_compiled(reason="it counts")
    def count(self, by: int = 1) -> int:
        """The number of steps so far."""
        self._inner()
        self.steps += by
        return self.steps

    def _inner(self) -> None:
        self.traced.append(torch.compiler.is_compiling())

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.count(by=2)
        return x + 1


def test_an_excluded_function_runs_uncompiled_and_never_recompiles():
    torch.compiler.reset()
    counter = Counter()
    step = torch.compile(counter.step, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            assert torch.equal(step(torch.zeros(2)), torch.ones(2))
    assert counter.steps == 8
    assert counter.traced == [False] * 4


def test_a_full_graph_is_refused_with_the_reason():
    torch.compiler.reset()
    step = torch.compile(Counter().step, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="it counts"):
        step(torch.zeros(2))


def test_an_excluded_function_keeps_its_name_and_words():
    assert Counter.count.__name__ == "count"
    assert Counter.count.__doc__ == "The number of steps so far."
    assert Counter().count() == 1
