"""The complete description of a run, validated when it is made.

Two runs with equal configs on the same device give the same weights and the same metrics, bit for
bit on a CPU with the same number of threads.

A config is a tree of frozen pydantic dataclasses: ``dataclasses.replace`` makes a changed copy, and
checks it. Types are strict (``True`` is no number, ``"3"`` is no integer); an integer may stand for a
float. :meth:`RunConfig.from_dict` and :func:`with_overrides` take what users write, and raise
:class:`ConfigError` with the full name of every setting at fault.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, field, fields
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

from polarstep_lab.methods import Method, find_method
from polarstep_lab.models.convnet import ConvNetConfig
from polarstep_lab.models.gpt import GPTConfig
from polarstep_lab.paper import Benchmark
from polarstep_lab.settings_by_name import ConfigError, explain, set_at
from polarstep_lab.storage import to_json

__all__ = [
    "AutoBudget",
    "Benchmark",
    "ConfigError",
    "EvaluationConfig",
    "ImageData",
    "NoiseConfig",
    "OptimizerConfig",
    "PolarConfig",
    "RestName",
    "RunConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "SketchName",
    "Stage",
    "TextData",
    "completed",
    "with_overrides",
]

# Infinity and NaN are refused because JSON has no word for them: they could not be read back.
CHECKED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
# One pattern need not be written as a list.
Patterns = Annotated[
    tuple[str, ...],
    Field(min_length=1, strict=False),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
SketchName = Literal["gaussian", "kaczmarz", "kaczmarz-filled", "warm"]
RestName = Literal["dropped", "lifted"]
SolverName = Literal[
    "cubic",
    "quintic",
    "quintic-2",
    "empirical",
    "polar-express",
    "polar-express-default",
    "polar-express-sketch",
    "exact",
]
AutoBudget = Literal["full", "balanced", "cheap"]


@dataclass(frozen=True, config=CHECKED)
class PolarConfig:
    """The polar map T of the Muon methods; ``rank=None`` is full space.

    ``"empirical"`` is the name the paper gives to Jordan's coefficients, and ``"polar-express"`` is the
    list that it prints for the benchmark. ``"polar-express-default"`` (what :class:`polarstep.Muon`
    takes by default, with five steps) and ``"polar-express-sketch"`` are ours. Sketches are the
    paper's two, ``"kaczmarz-filled"``, in which no column is drawn twice, and ``"warm"``, which starts
    from the last step's factor (:class:`polarstep.Warm`).

    ``rest`` says what becomes of R = M − QQᵀM, which the paper's maps drop. ``"lifted"`` keeps it
    (:class:`polarstep.Deflated`): it is lifted together with the head by one step of degree 17. With
    ``float8`` this step is in eight bits on GPUs that have them, and in bfloat16 on CPUs with tiles.

    With ``auto`` the map is chosen for each shape and device (:class:`polarstep.Auto` with this
    budget), and all other settings have their defaults. ``map`` is the name of a map that a study file
    defines (the ``maps`` of :class:`polarstep_lab.study.Study`), which also has the defaults beside it.
    """

    solver: SolverName = "quintic"
    steps: Natural = 7
    delta: Literal["frobenius", "spectral", "operator"] = "frobenius"
    rank: Count | None = None
    oversample: Natural = 10
    power: Annotated[float, Field(ge=0, multiple_of=0.5)] = 1.0
    sketch: SketchName = "gaussian"
    rest: RestName = "dropped"
    float8: bool = False
    auto: AutoBudget | None = None
    map: str | None = None

    def __post_init__(self) -> None:
        for name in ("auto", "map"):
            chosen = getattr(self, name)
            changed = [
                f"optimizer.polar.{f.name}={getattr(self, f.name)}"
                for f in fields(self)
                if f.name != name and getattr(self, f.name) != f.default
            ]
            if chosen is not None and changed:
                remedy = (
                    f"take --method auto or --vary auto={chosen}" if name == "auto" else "drop them"
                )
                raise ValueError(
                    f"{', '.join(changed)} with optimizer.polar.{name}={chosen}, which chooses the map "
                    f"itself: expected the defaults; {remedy}, or set optimizer.polar.{name}=null"
                )
        if self.float8 and self.rest != "lifted":
            raise ValueError(
                f"optimizer.polar.float8=true with optimizer.polar.rest={self.rest}: expected lifted, "
                "as only the step that lifts the rest can be in eight bits; set "
                f"optimizer.polar.float8=false too, or take --vary rest={self.rest}"
            )
        if self.rest != "dropped" and self.rank is None:
            raise ValueError(
                f"optimizer.polar.rest={self.rest}: expected dropped with optimizer.polar.rank=null, "
                "as full space leaves no rest; set a rank"
            )


@dataclass(frozen=True, config=CHECKED)
class OptimizerConfig:
    """Learning rates, momenta and decay.

    ``lr``, ``momentum`` and ``weight_decay`` are those of the method itself (for AdamW, momentum
    is β₁). The others are for what a Muon method leaves to AdamW (nanoGPT) or to SGD (CIFAR-10).
    Rates of embedding, head and vectors also hold for the baselines: on CIFAR-10 as in the authors'
    code, on nanoGPT where they are not 0.
    """

    lr: NotNegative
    momentum: BelowOne = 0.95
    beta2: BelowOne = 0.95
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    shape_scale: Literal["none", "spectral", "fan-ratio", "rms"] = "spectral"
    polar: PolarConfig = field(default_factory=PolarConfig)
    normalize_rows: bool = False
    """Divide the rows of T by the root of their second moment (:class:`polarstep.NormalizedRows`)."""
    momentum_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """How Muon's momentum is kept; ``"int8"`` with a scale for each block."""
    rounding: Literal["nearest", "compensated"] = "nearest"
    """How updates of bfloat16 parameters are rounded."""
    embedding_lr: NotNegative = 0.0
    head_lr: NotNegative = 0.0
    vector_lr: NotNegative = 0.0
    other_momentum: BelowOne = 0.9
    decay_per_image: float = 0.0
    """CIFAR-10: weight decay of vectors and head per image of the batch, learning rate included."""
    normalize_filters: bool = False
    """CIFAR-10: rescale each filter to Frobenius norm √out before its update, as Airbench does."""


@dataclass(frozen=True, config=CHECKED)
class ScheduleConfig:
    """The shape of the learning rate, and of Muon's momentum, over the run.

    The rate rises linearly over the first ``warmup`` steps, is constant, then falls linearly over the
    last ``cooldown`` of the scheduled steps to ``final``, both as fractions; ``extension`` more steps
    stay at ``final``. Momentum rises from ``momentum_start`` over the first ``momentum_warmup`` of the
    run and falls back to it over the last ``momentum_cooldown`` steps.
    """

    warmup: Natural = 0
    cooldown: Annotated[float, Field(gt=0, le=1)] = 1.0
    final: NotNegative = 0.0
    extension: Natural = 0
    momentum_start: BelowOne | None = None
    momentum_warmup: Annotated[float, Field(ge=0, le=1)] = 0.2
    momentum_cooldown: Natural = 0

    def check_steps(self, steps: int) -> None:
        """Raise if the extension is all of the run."""
        if self.extension >= steps:
            raise ConfigError(
                f"schedule.extension={self.extension} leaves nothing of the {steps} steps: "
                "expected fewer"
            )


@dataclass(frozen=True, config=CHECKED)
class Stage:
    """A stretch of language-model training with one batch shape and learning-rate multiplier."""

    steps: Count
    sequences: Count
    sequence_length: Count
    lr: Positive = 1.0


@dataclass(frozen=True, config=CHECKED)
class TextData:
    """Tokens to train and validate on: glob patterns of shards, or ``corpus:NAME``."""

    train: Patterns
    val: Patterns
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    draws: Literal["keyed", "plain"] = "keyed"
    """How the seed gives weights and the order of the text. ``"keyed"``: numbers of their own for each.
    With ``"plain"`` the seed itself starts the generator of the weights, and 1000 + seed the one that
    shuffles the windows that the run reads; only a run of one pass can be drawn so."""

    @property
    def steps(self) -> int:
        """All steps of the run."""
        return sum(stage.steps for stage in self.stages)

    @property
    def window(self) -> int:
        """The longest sequence: what the shards are cut into."""
        return max(stage.sequence_length for stage in self.stages)


@dataclass(frozen=True, config=CHECKED)
class ImageData:
    """CIFAR-10: where it is, how it is split, batched and augmented."""

    root: str = "data"
    batch_size: Count = 500
    epochs: Positive = 8.0
    held_out: int = 5000
    split_seed: int = 0
    train_images: int | None = None
    """Train on so many images only."""
    flip: bool = True
    translation: Annotated[int, Field(ge=0, lt=32)] = 2
    label_smoothing: BelowOne = 0.2
    whitening_images: Count = 5000


@dataclass(frozen=True, config=CHECKED)
class EvaluationConfig:
    """When and on how much to validate. A validation at step 0 and one at the end are always made.

    Held-out text is cut in two halves. Validation reads ``tokens`` tokens of the first half. The test
    reads as many of the second, once, after the last step.
    """

    every: Count = 100
    tokens: Count = 10_485_760
    batch: Count = 64
    test_time_augmentation: bool = True


@dataclass(frozen=True, config=CHECKED)
class NoiseConfig:
    """Gradient noise: at how many points of the run it is measured, and from how many gradients.

    ∇f is estimated from ``reference`` batches. The noise is measured on further ``batches``, and on
    ``examples`` single examples. From fewer than 100 draws no tail index is estimated.
    """

    points: Annotated[int, Field(ge=2)] | None = None
    reference: Count = 64
    batches: Annotated[int, Field(ge=2)] = 128
    examples: Natural = 512

    def __post_init__(self) -> None:
        if self.examples == 1:
            raise ValueError("runtime.noise.examples=1: expected 0, or at least 2")


@dataclass(frozen=True, config=CHECKED)
class RuntimeConfig:
    """How to run: nothing here is meant to change the result beyond rounding, but ``parameters``."""

    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    parameters: Literal["float32", "bfloat16"] = "float32"
    """In what the parameters of a GPT are kept."""
    compile: bool | None = False
    """Compile the network; null: a GPT on a GPU."""
    cuda_graph: bool = True
    """CIFAR-10 on a GPU: replay forward and backward pass as one graph."""
    keep_checkpoint: bool = True
    """Keep the checkpoint of a finished run: its weights, and the optimizer's state."""
    micro_batch: Count | None = None
    """Sequences per forward pass; gradients accumulate over the rest of the batch."""
    log_every: Count = 10
    checkpoint_seconds: NotNegative = 30.0
    monitor_every: Count | None = None
    """Record γ and ν of Muon's polar steps every so many steps."""
    noise: NoiseConfig = field(default_factory=NoiseConfig)


def _benchmark_of(group: Any) -> Benchmark:
    """The benchmark whose model or data a group of settings describes."""
    if isinstance(group, Mapping):
        return "nanogpt" if "vocab_size" in group or "stages" in group else "cifar10"
    return "nanogpt" if isinstance(group, GPTConfig | TextData) else "cifar10"


TEXT, IMAGES, BY_BENCHMARK = Tag("nanogpt"), Tag("cifar10"), Discriminator(_benchmark_of)


@dataclass(frozen=True, config=CHECKED)
class RunConfig:
    """Everything that determines a run."""

    recipe: str
    benchmark: Benchmark
    method: str
    seed: int
    model: Annotated[Annotated[GPTConfig, TEXT] | Annotated[ConvNetConfig, IMAGES], BY_BENCHMARK]
    data: Annotated[Annotated[TextData, TEXT] | Annotated[ImageData, IMAGES], BY_BENCHMARK]
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        find_method(self.method)
        if not self.benchmark == _benchmark_of(self.model) == _benchmark_of(self.data):
            raise ValueError(
                f"benchmark={self.benchmark!r} does not go with this model and this data: expected "
                "a GPT and text for nanogpt, a CNN and images for cifar10"
            )
        if isinstance(self.model, GPTConfig) and isinstance(self.data, TextData):
            if self.data.window > self.model.context:
                raise ValueError(
                    f"sequences of {self.data.window} tokens are longer than model.context="
                    f"{self.model.context}: raise model.context or shorten data.stages"
                )
            self.schedule.check_steps(self.data.steps)
        elif self.runtime.micro_batch is not None:
            raise ValueError(
                f"runtime.micro_batch={self.runtime.micro_batch} would change what batch norm sees: "
                "expected null on CIFAR-10"
            )

    @property
    def rule(self) -> Method:
        """The method as an object."""
        return find_method(self.method)

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON data."""
        plain: dict[str, Any] = to_json(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunConfig:
        """A config from JSON data; settings that are not there have their defaults."""
        try:
            # As JSON, because only there does a strict pydantic take lists for tuples.
            return _RUN.validate_json(json.dumps(data, default=str))
        except pydantic.ValidationError as error:
            raise ConfigError(explain(error)) from None


_RUN = pydantic.TypeAdapter(RunConfig)


def completed(config: Any) -> Any:
    """The config of a record as this version writes it: newer settings have their defaults.

    A config that this version cannot read is returned as it is.
    """
    try:
        return RunConfig.from_dict(config).to_dict()
    except ConfigError:
        return config


_CHOSEN_ELSEWHERE = {
    "recipe": "name the recipe itself, as in `polarstep run {value}`",
    "benchmark": "it is the recipe's; choose another recipe (polarstep list shows them)",
    "method": "choose it with --method {value} (compare: --methods)",
    "seed": "choose it with --seed {value} (compare and ablate: --seeds)",
}
"""What a run is filed under. An override would change the run and not what its record says it is."""


def with_overrides(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """``config`` with leaves replaced, as in ``{"optimizer.lr": 0.02, "model.layers": 4}``."""
    data = config.to_dict()
    for path, value in overrides.items():
        if path in _CHOSEN_ELSEWHERE:
            remedy = _CHOSEN_ELSEWHERE[path].format(value=value)
            raise ConfigError(f"{path}={value}: no setting to override; {remedy}")
        set_at(data, path, value)
    return RunConfig.from_dict(data)
