"""A study: the trials of one method on one recipe, in a file that survives being interrupted.

The storage is a file. ``NAME.db`` is SQLite; anything else is Optuna's journal, a log of appended
lines that several processes may share. One file holds the studies of any number of methods; a study
remembers what it tunes and refuses to be continued as something else.

Trials of workers that were killed are run again. Optuna finds such trials by heartbeats, but its
journal has none, and whoever continues a study would have to wait until the last heartbeat is old.
Here every process at work on a file holds a shared lock on it, which the operating system releases
when the process ends in whatever way. A process that gets the lock for itself is alone: all trials
under way are then those of dead workers (:func:`at_work`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import optuna
from optuna.trial import FrozenTrial, TrialState

from polarstep.rng import key_to_seed
from polarstep_lab.config import ConfigError
from polarstep_lab.recipes import Range
from polarstep_lab.storage import read_lines, to_json

try:
    import fcntl
except ImportError:  # Windows has no flock; there, trials of killed workers are not run again.
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "StudySpec",
    "at_work",
    "best_trial",
    "count",
    "give_back",
    "open_study",
    "opening_values",
    "reseed",
]

DONE = (TrialState.COMPLETE, TrialState.PRUNED)
"""States that spent a trial of the budget: a run to its end, or one cut short for being behind."""

OPENING = 4
"""Trials before TPE and pruning set in."""

Pruner = Literal["median", "hyperband", "none"]


@dataclass(frozen=True)
class StudySpec:
    """What is tuned, and how; two studies with equal specs and one worker try the same values."""

    storage: Path
    recipe: str
    method: str
    space: Mapping[str, Range]
    start: Mapping[str, float] = field(default_factory=dict)
    """The first trial: what the recipe's function gives, so that tuning cannot end worse than that."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    pruner: Pruner = "median"

    def __post_init__(self) -> None:
        if not self.space:
            raise ConfigError(
                f"recipe {self.recipe!r} marks nothing to tune for {self.method}: expected a range "
                "for at least one setting in its search space"
            )

    @property
    def name(self) -> str:
        """The study's name within its file."""
        return f"{self.recipe}/{self.method}"

    @property
    def identity(self) -> dict[str, Any]:
        """What may not change between the trials of one study."""
        space = {key: [r.low, r.high, r.log] for key, r in self.space.items()}
        identity: dict[str, Any] = to_json(
            {
                "recipe": self.recipe,
                "method": self.method,
                "space": space,
                "overrides": dict(self.overrides),
                "seed": self.seed,
                "pruner": self.pruner,
            }
        )
        return identity


def open_study(spec: StudySpec) -> optuna.Study:
    """Create the study or continue it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spec.storage.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        settings: dict[str, Any] = {
            "study_name": spec.name,
            "storage": _storage(spec.storage),
            "pruner": _pruner(spec.pruner),
        }
        try:
            study = optuna.load_study(**settings)  # a study that is only read is not written to
        except KeyError:
            study = optuna.create_study(direction="minimize", load_if_exists=True, **settings)
    known = study.user_attrs.get("identity")
    if known is None:
        study.set_user_attr("identity", spec.identity)
        for values in opening_values(spec):
            study.enqueue_trial(values)
    elif known != spec.identity:
        changed = [key for key in spec.identity if known.get(key) != spec.identity[key]]
        raise ConfigError(
            f"{spec.storage} already holds the study {spec.name!r} with another "
            f"{', '.join(changed)} ({', '.join(str(known.get(key)) for key in changed)}): trials "
            "are comparable only under equal settings; choose another --study"
        )
    return study


def opening_values(spec: StudySpec) -> list[dict[str, float]]:
    """What is tried before there is anything to learn from: ``start``, then a spread.

    The spread is the additive recurrence of the generalized golden ratio (M. Roberts, "The
    Unreasonable Effectiveness of Quasirandom Sequences", 2018). With a budget of ten trials, random
    ones would too often fall beside each other; and every method opens alike.

    >>> spec = StudySpec(Path("s"), "r", "m", {"lr": Range(0.001, 1.0, log=True)}, {"lr": 0.02})
    >>> [round(values["lr"], 4) for values in opening_values(spec)]
    [0.02, 0.0023, 0.1615, 0.0115]
    """
    ratio = 2.0
    for _ in range(40):  # the root of x^(d+1) = x + 1
        ratio = (1 + ratio) ** (1 / (len(spec.space) + 1))
    opening = [dict(spec.start)] if spec.start else []
    while len(opening) < OPENING:
        number = len(opening) if spec.start else len(opening) + 1
        shares = ((0.5 + number * ratio ** -(axis + 1)) % 1 for axis in range(len(spec.space)))
        opening.append(
            {
                key: _at(space, share)
                for (key, space), share in zip(spec.space.items(), shares, strict=True)
            }
        )
    return opening


def reseed(study: optuna.Study, spec: StudySpec, worker: int) -> None:
    """Give the study the sampler of its next trial.

    The sampler is seeded by the number of trials there already are: a study that was interrupted and
    continued tries the values it would have tried without the interruption.
    """
    seed = key_to_seed("tune", spec.name, spec.seed, len(study.trials), worker) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.sampler = optuna.samplers.TPESampler(
            n_startup_trials=OPENING, multivariate=True, constant_liar=True, seed=seed
        )


def count(study: optuna.Study, *states: TrialState) -> int:
    """How many trials are in any of ``states``."""
    return len(study.get_trials(deepcopy=False, states=states))


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """The trial with the lowest final validation loss; pruned trials have none."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return min(complete, key=lambda trial: (trial.value, trial.number), default=None)


@contextmanager
def at_work(spec: StudySpec) -> Iterator[optuna.Study]:
    """The study, while this process counts as one at work on its file.

    Whoever enters or leaves alone puts trials of dead workers back in the queue. Whoever enters alone
    also drops an incomplete last line of the journal.
    """
    spec.storage.parent.mkdir(parents=True, exist_ok=True)
    with spec.storage.open("ab") as file:
        alone = _lock_alone(file)
        if alone and spec.storage.suffix != ".db":
            _mend(file, spec.storage)
        study = open_study(spec)
        if alone:
            _revive(study)
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield study
        finally:
            if _lock_alone(file):
                _revive(study)


def give_back(study: optuna.Study, number: int) -> None:
    """End a trial that was interrupted, and queue its values to be tried again.

    Its values are those it has asked for, and those it was queued with.
    """
    trial = study.get_trials(deepcopy=False)[number]
    values = trial.system_attrs.get("fixed_params", {}) | trial.params
    study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
    if values:
        study.enqueue_trial(values)


def _lock_alone(file: IO[bytes]) -> bool:
    """Whether no other process holds a lock on ``file``; if so, this process holds the only one."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _revive(study: optuna.Study) -> None:
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        give_back(study, trial.number)


def _mend(file: IO[bytes], journal: Path) -> None:
    """Drop what a kill or a full disk left of a last line, and the lock of the process that wrote it.

    The next line would be appended to the incomplete one, and Optuna could read neither.
    """
    content = journal.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        file.truncate(complete)
        logging.getLogger(__name__).warning(
            "%s ended within a line, as a kill or a full disk leaves it: its last %d bytes are "
            "dropped, and the study continues from the line before",
            journal,
            len(content) - complete,
        )
    read_lines(journal)  # an error in any other line is named here
    Path(f"{journal}.lock").unlink(missing_ok=True)


def _at(space: Range, share: float) -> float:
    """The value a share of the way from the low end of a range to its high end."""
    if space.log:
        return float(space.low * (space.high / space.low) ** share)
    return space.low + (space.high - space.low) * share


def _storage(path: Path) -> optuna.storages.BaseStorage:
    if path.suffix == ".db":
        return optuna.storages.RDBStorage(
            f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}}
        )
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage

    lock = JournalFileOpenLock(str(path))  # works where a file system has no symbolic links
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _pruner(name: Pruner) -> optuna.pruners.BasePruner:
    if name == "median":
        # Nothing is pruned on its first validation: a high learning rate starts fast and ends badly.
        return optuna.pruners.MedianPruner(
            n_startup_trials=OPENING, n_warmup_steps=2, n_min_trials=3
        )
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=1, reduction_factor=3)
    if name == "none":
        return optuna.pruners.NopPruner()
    raise ConfigError(f"pruner {name!r}: expected median, hyperband or none")
