"""The complete description of a run, validated when it is made.

Two runs with equal configs on the same device give the same weights and the same metrics, bit for
bit on a CPU with the same number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from polarstep.storage import to_json
from polarstep_lab.methods import Method, find_method
from polarstep_lab.models.convnet import ConvNetConfig
from polarstep_lab.models.gpt import GPTConfig
from polarstep_lab.structure import ConfigError, from_plain, set_at, to_plain

__all__ = [
    "ConfigError",
    "EvaluationConfig",
    "ImageData",
    "NoiseConfig",
    "OptimizerConfig",
    "PolarConfig",
    "RunConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "SketchName",
    "Stage",
    "TextData",
    "with_overrides",
]

Benchmark = Literal["nanogpt", "cifar10"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


SketchName = Literal["gaussian", "kaczmarz", "warm"]


@dataclass(frozen=True)
class PolarConfig:
    """The polar map T of the Muon methods; ``rank=None`` is full space.

    ``"empirical"`` is the name the paper gives to Jordan's coefficients; ``"polar-express-sketch"`` is
    ours. Sketches are the paper's two and ``"warm"``, which starts from the last step's factor
    (:class:`polarstep.Warm`). A basis may serve ``keep`` steps.
    """

    solver: Literal[
        "cubic",
        "quintic",
        "quintic-2",
        "empirical",
        "polar-express",
        "polar-express-sketch",
        "exact",
    ] = "quintic"
    steps: int = 7
    delta: Literal["frobenius", "spectral"] = "frobenius"
    rank: int | None = None
    oversample: int = 10
    power: float = 1.0
    sketch: SketchName = "gaussian"
    keep: int = 1

    def __post_init__(self) -> None:
        _require(self.steps >= 0, f"optimizer.polar.steps={self.steps}: expected at least 0")
        _require(
            self.rank is None or self.rank >= 1,
            f"optimizer.polar.rank={self.rank}: expected at least 1, or null for full space",
        )
        _require(
            self.oversample >= 0,
            f"optimizer.polar.oversample={self.oversample}: expected at least 0",
        )
        _require(
            self.power >= 0 and float(2 * self.power).is_integer(),
            f"optimizer.polar.power={self.power}: expected 0, 0.5, 1, 1.5, …",
        )
        _require(
            self.keep >= 1 and (self.keep == 1 or self.sketch != "warm"),
            f"optimizer.polar.keep={self.keep}: expected at least 1, and 1 with a warm sketch",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """Learning rates, momenta and decay.

    ``lr``, ``momentum`` and ``weight_decay`` are those of the method itself (for AdamW, momentum
    is β₁). The others are for what a Muon method leaves to AdamW (nanoGPT) or to SGD (CIFAR-10).
    Rates of embedding, head and vectors also hold for the baselines: on CIFAR-10 as in the authors'
    code, on nanoGPT where they are not 0.
    """

    lr: float
    momentum: float = 0.95
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_scale: Literal["none", "spectral", "rms"] = "spectral"
    polar: PolarConfig = field(default_factory=PolarConfig)
    embedding_lr: float = 0.0
    head_lr: float = 0.0
    vector_lr: float = 0.0
    other_momentum: float = 0.9
    decay_per_image: float = 0.0
    """CIFAR-10: weight decay of vectors and head per image of the batch, learning rate included."""
    normalize_filters: bool = False
    """CIFAR-10: rescale each filter to Frobenius norm √out before its update, as Airbench does."""

    def __post_init__(self) -> None:
        for name in ("lr", "embedding_lr", "head_lr", "vector_lr", "weight_decay", "eps"):
            value = getattr(self, name)
            _require(
                0 <= value < float("inf"), f"optimizer.{name}={value}: expected a finite number ≥ 0"
            )
        for name in ("momentum", "beta2", "other_momentum"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name}={value}: expected 0 ≤ {name} < 1")


@dataclass(frozen=True)
class ScheduleConfig:
    """The shape of the learning rate, and of Muon's momentum, over the run.

    The rate rises linearly over the first ``warmup`` steps, is constant, then falls linearly over the
    last ``cooldown`` of the scheduled steps to ``final``, both as fractions; ``extension`` more steps
    stay at ``final``. Momentum rises from ``momentum_start`` over the first ``momentum_warmup`` of the
    run and falls back to it over the last ``momentum_cooldown`` steps.
    """

    warmup: int = 0
    cooldown: float = 1.0
    final: float = 0.0
    extension: int = 0
    momentum_start: float | None = None
    momentum_warmup: float = 0.2
    momentum_cooldown: int = 0

    def __post_init__(self) -> None:
        _require(0 < self.cooldown <= 1, f"schedule.cooldown={self.cooldown}: expected in (0, 1]")
        _require(self.final >= 0, f"schedule.final={self.final}: expected at least 0")
        _require(self.warmup >= 0, f"schedule.warmup={self.warmup}: expected at least 0")
        _require(self.extension >= 0, f"schedule.extension={self.extension}: expected at least 0")
        _require(
            self.momentum_start is None or 0 <= self.momentum_start < 1,
            f"schedule.momentum_start={self.momentum_start}: expected in [0, 1), or null",
        )
        _require(
            0 <= self.momentum_warmup <= 1,
            f"schedule.momentum_warmup={self.momentum_warmup}: expected a fraction of the run",
        )


@dataclass(frozen=True)
class Stage:
    """A stretch of language-model training with one batch shape and learning-rate multiplier."""

    steps: int
    sequences: int
    sequence_length: int
    lr: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "sequences", "sequence_length"):
            value = getattr(self, name)
            _require(value >= 1, f"data.stages: {name}={value}: expected at least 1")
        _require(self.lr > 0, f"data.stages: lr={self.lr}: expected a positive multiplier")


@dataclass(frozen=True)
class TextData:
    """Tokens to train and validate on: glob patterns of shards, or ``corpus:NAME``."""

    train: tuple[str, ...]
    val: tuple[str, ...]
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        _require(bool(self.stages), "data.stages is empty: expected at least one stage")
        _require(bool(self.train and self.val), "data.train and data.val need a pattern each")

    @property
    def steps(self) -> int:
        """All steps of the run."""
        return sum(stage.steps for stage in self.stages)

    @property
    def window(self) -> int:
        """The longest sequence: what the shards are cut into."""
        return max(stage.sequence_length for stage in self.stages)


@dataclass(frozen=True)
class ImageData:
    """CIFAR-10: where it is, how it is split, batched and augmented."""

    root: str = "data"
    batch_size: int = 500
    epochs: float = 8.0
    held_out: int = 5000
    split_seed: int = 0
    train_images: int | None = None
    """Train on so many images only."""
    flip: bool = True
    translation: int = 2
    label_smoothing: float = 0.2
    whitening_images: int = 5000

    def __post_init__(self) -> None:
        _require(self.batch_size >= 1, f"data.batch_size={self.batch_size}: expected at least 1")
        _require(self.epochs > 0, f"data.epochs={self.epochs}: expected a positive number")
        _require(
            0 <= self.translation < 32, f"data.translation={self.translation}: expected 0 to 31"
        )
        _require(
            0 <= self.label_smoothing < 1,
            f"data.label_smoothing={self.label_smoothing}: expected in [0, 1)",
        )


@dataclass(frozen=True)
class EvaluationConfig:
    """When and on how much to validate. A validation at step 0 and one at the end are always made."""

    every: int = 100
    tokens: int = 10_485_760
    batch: int = 64
    test_time_augmentation: bool = True

    def __post_init__(self) -> None:
        for name in ("every", "tokens", "batch"):
            value = getattr(self, name)
            _require(value >= 1, f"evaluation.{name}={value}: expected at least 1")


@dataclass(frozen=True)
class NoiseConfig:
    """Gradient noise: at how many points of the run it is measured, and from how many gradients.

    ``reference`` batches are for ∇f; the noise is that of further ``batches``, and of as many single
    ``examples``. Below 100 no tail index is estimated.
    """

    points: int | None = None
    reference: int = 64
    batches: int = 128
    examples: int = 512

    def __post_init__(self) -> None:
        _require(
            self.points is None or self.points >= 2,
            f"runtime.noise.points={self.points}: expected at least 2, the first and the last step, "
            "or null for none",
        )
        for name, least in (("reference", 1), ("batches", 2), ("examples", 0)):
            value = getattr(self, name)
            _require(value >= least, f"runtime.noise.{name}={value}: expected at least {least}")
        _require(self.examples != 1, "runtime.noise.examples=1: expected 0, or at least 2")


@dataclass(frozen=True)
class RuntimeConfig:
    """How to run: nothing here is meant to change the result beyond rounding."""

    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool | None = False
    """Compile the network; null: a GPT on a GPU."""
    cuda_graph: bool = True
    """CIFAR-10 on a GPU: replay forward and backward pass as one graph."""
    keep_checkpoint: bool = True
    """Keep the checkpoint of a finished run: its weights, and the optimizer's state."""
    micro_batch: int | None = None
    """Sequences per forward pass; gradients accumulate over the rest of the batch."""
    log_every: int = 10
    checkpoint_seconds: float = 30.0
    monitor_every: int | None = None
    """Record γ and ν of Muon's polar steps every so many steps."""
    noise: NoiseConfig = field(default_factory=NoiseConfig)

    def __post_init__(self) -> None:
        _require(
            self.monitor_every is None or self.monitor_every >= 1,
            f"runtime.monitor_every={self.monitor_every}: expected at least 1, or null",
        )
        _require(self.log_every >= 1, f"runtime.log_every={self.log_every}: expected at least 1")
        _require(
            self.micro_batch is None or self.micro_batch >= 1,
            f"runtime.micro_batch={self.micro_batch}: expected at least 1, or null",
        )
        _require(
            self.checkpoint_seconds >= 0,
            f"runtime.checkpoint_seconds={self.checkpoint_seconds}: expected at least 0",
        )


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run."""

    recipe: str
    benchmark: Benchmark
    method: str
    seed: int
    model: GPTConfig | ConvNetConfig
    data: TextData | ImageData
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        text = self.benchmark == "nanogpt"
        _require(
            isinstance(self.model, GPTConfig) is text and isinstance(self.data, TextData) is text,
            f"benchmark={self.benchmark!r} does not go with this model and this data",
        )
        find_method(self.method)
        if isinstance(self.model, GPTConfig) and isinstance(self.data, TextData):
            _require(
                self.data.window <= self.model.context,
                f"sequences of {self.data.window} tokens are longer than model.context="
                f"{self.model.context}",
            )
            _require(
                self.schedule.extension < self.data.steps,
                f"schedule.extension={self.schedule.extension} leaves nothing of the "
                f"{self.data.steps} steps",
            )
        else:
            _require(
                self.runtime.micro_batch is None,
                "runtime.micro_batch would change what batch norm sees: expected null on CIFAR-10",
            )

    @property
    def rule(self) -> Method:
        """The method as an object."""
        return find_method(self.method)

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON data."""
        plain: dict[str, Any] = to_json(to_plain(self))
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunConfig:
        """A config from JSON data."""
        return from_plain(cls, data)


def completed(config: Any) -> Any:
    """The config of a record as this version writes it: settings that are newer have their defaults.

    One that this version cannot read stays as it is.
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
    if not overrides:
        return replace(config)
    data = config.to_dict()
    for path, value in overrides.items():
        if path in _CHOSEN_ELSEWHERE:
            remedy = _CHOSEN_ELSEWHERE[path].format(value=value)
            raise ConfigError(f"{path}={value}: no setting to override; {remedy}")
        set_at(data, path, value)
    return RunConfig.from_dict(data)
