"""LoRA’s factors are recognized; a step moves the layer no further than a step of its own would."""

from __future__ import annotations

import math

import pytest
import torch
from tests.routing.sample_models import Bag
from tests.spectra import gaussian
from torch import Tensor, nn

from polarstep import Exact, Muon, NormalizedRows, muon_for

RANK, OUTPUTS, INPUTS = 4, 96, 48


class Lora(nn.Module):
    """W + s·BA with PEFT's names."""

    def __init__(
        self, outputs: int = OUTPUTS, inputs: int = INPUTS, scaling: float = 2.0, dora: bool = False
    ) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, outputs, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)
        self.scaling = {"default": scaling}
        if dora:
            magnitude = Bag(weight=torch.ones(outputs))
            self.lora_magnitude_vector = nn.ModuleDict({"default": magnitude})

    def delta(self) -> Tensor:
        A, B = self.lora_A["default"].weight, self.lora_B["default"].weight
        return self.scaling["default"] * B @ A

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.delta().mT


def in_a_model(*layers: nn.Module) -> nn.Module:
    blocks = nn.ModuleList([Bag(**{f"layer{i}": layer for i, layer in enumerate(layers)})])
    return Bag(blocks=blocks, head=nn.Linear(8, 5).requires_grad_(False))


def step_with(model: nn.Module, optimizer: Muon, seed: int) -> None:
    for i, p in enumerate(p for p in model.parameters() if p.requires_grad):
        p.grad = gaussian(*p.shape, seed=10 * seed + i).to(p.dtype)
    optimizer.step()


@pytest.mark.parametrize("scaling", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("shape", [(96, 48), (48, 96)], ids=str)
@pytest.mark.parametrize("scale", ["spectral", "fan-ratio", "rms"])
def test_a_step_moves_the_layer_no_further_than_a_step_of_its_own(scaling, shape, scale):
    """‖Δ(s·BA)‖₂ ≤ η·scale(m, n) while ‖A‖, ‖B‖ ≤ 1, and not many times less."""
    layer = Lora(*shape, scaling=scaling)
    model = in_a_model(layer)
    lr = 1e-3
    optimizer = muon_for(model, lr, polar=Exact(), shape_scale=scale)
    m, n = shape
    full = {
        "spectral": math.sqrt(max(1, m / n)),
        "fan-ratio": math.sqrt(m / n),
        "rms": 0.2 * math.sqrt(max(m, n)),
    }[scale]
    moves = []
    for k in range(30):
        before = layer.delta().detach()
        step_with(model, optimizer, k)
        moves.append(torch.linalg.matrix_norm(layer.delta().detach() - before, 2).item())
        for factor in (layer.lora_A, layer.lora_B):
            assert torch.linalg.matrix_norm(factor["default"].weight.detach(), 2) <= 1
    assert max(moves) <= lr * full * (1 + 1e-3)
    assert moves[0] >= lr * full / 8


def test_both_factors_step_alike_and_the_table_shows_the_factor():
    layer = Lora(4096 // 8, 512)
    model = in_a_model(layer)
    optimizer = muon_for(model, 0.02, polar=Exact(), transform=None, weight_decay=0.0)
    A, B = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    before = [p.detach().clone() for p in (A, B)]
    step_with(model, optimizer, 0)
    sizes = [(p.detach() - q).square().mean().sqrt() for p, q in zip((A, B), before, strict=True)]
    torch.testing.assert_close(*sizes)
    step = torch.linalg.matrix_norm(B.detach() - before[1], 2).item()
    assert step == pytest.approx(0.02 / 4, rel=1e-3)
    row = optimizer.routes["blocks.0.layer0.lora_B.default.weight"]
    assert row.factors == (0.25,)
    assert row.why == "adapter: LoRA B of layer0 512×512, s = 2"
    assert "Muon, lr 0.02 × 0.25" in str(optimizer.routes)
    assert [g["role"] for g in optimizer.param_groups] == ["adapter"]


def test_magnitudes_embeddings_and_convolutions():
    dora = Lora(dora=True)
    table = Bag(
        lora_embedding_A=nn.ParameterDict({"default": gaussian(RANK, 50)}),
        lora_embedding_B=nn.ParameterDict({"default": gaussian(8, RANK)}),
    )
    conv = Bag(
        lora_A=nn.ModuleDict({"default": nn.Conv2d(3, RANK, 3, bias=False)}),
        lora_B=nn.ModuleDict({"default": nn.Conv2d(RANK, 12, 1, bias=False)}),
    )
    routes = muon_for(in_a_model(dora, table, conv)).routes
    found = {row.name.split(".", 3)[3]: row.role for row in routes if row.algorithm != "left out"}
    assert found == {
        "lora_A.default.weight": "adapter",
        "lora_B.default.weight": "adapter",
        "lora_magnitude_vector.default.weight": "vector",
        "lora_embedding_A.default": "embedding",
        "lora_embedding_B.default": "embedding",
    }
    assert "12×27" in routes["blocks.0.layer2.lora_B.default.weight"].why


@pytest.mark.parametrize(
    "layer",
    [
        Bag(lora_A=gaussian(RANK, 8), lora_B=gaussian(12, RANK)),
        Bag(lora_a=nn.Linear(8, RANK, bias=False), lora_b=nn.Linear(RANK, 12, bias=False)),
    ],
    ids=["parameters", "lower case"],
)
def test_other_libraries_names(layer):
    layer.alpha = 16
    routes = muon_for(in_a_model(layer)).routes
    assert {row.role for row in routes if row.algorithm == "Muon"} == {"adapter"}
    assert all(row.factors == (math.sqrt(12 / 8) / 8,) for row in routes if row.factors)


@pytest.mark.parametrize("shape", [(96, 48), (48, 96), (64, 64)], ids=str)
@pytest.mark.parametrize("scale", ["spectral", "rms"])
def test_factors_stored_the_other_way_round_take_the_same_steps(shape, scale):
    """Many layers compute x @ A @ B; B and A of x·(BA)ᵀ are the transposes of their factors."""
    m, n = shape
    A, B = gaussian(RANK, n, seed=1), gaussian(m, RANK, seed=2)
    layers = [
        Bag(lora_A=A.clone(), lora_B=B.clone()),
        Bag(lora_A=A.mT.clone(), lora_B=B.mT.clone()),
    ]
    for layer in layers:
        layer.alpha = 2 * RANK  # s = 2
    plain, stored = layers
    for layer in layers:
        optimizer = muon_for(
            in_a_model(layer),
            1e-3,
            polar=Exact(),
            shape_scale=scale,
            transform=NormalizedRows(),
        )
        for k in range(3):
            gradients = gaussian(RANK, n, seed=10 + k), gaussian(m, RANK, seed=20 + k)
            for p, G in zip((layer.lora_A, layer.lora_B), gradients, strict=True):
                p.grad = G if layer is plain else G.mT.contiguous()
            optimizer.step()
        row = optimizer.routes["blocks.0.layer0.lora_A"]
        assert row.why == f"adapter: LoRA A of layer0 {m}×{n}, s = 2"
    torch.testing.assert_close(stored.lora_A, plain.lora_A.mT)
    torch.testing.assert_close(stored.lora_B, plain.lora_B.mT)


def test_factors_that_do_not_fit_are_matrices_like_others():
    layer = Bag(lora_A=gaussian(RANK, 8), lora_B=gaussian(12, 7))
    routes = muon_for(in_a_model(layer)).routes
    assert routes["blocks.0.layer0.lora_B"].role == "hidden"


def test_an_adapted_head_stays_a_head():
    model = Bag(blocks=nn.ModuleList([Bag(a=Lora(8, 8), b=Lora(8, 8))]), head=Lora(5, 8))
    routes = muon_for(model).routes
    assert routes["head.lora_B.default.weight"].role == "head"
    assert routes["head.lora_A.default.weight"].role == "adapter"
    assert routes["blocks.0.b.lora_B.default.weight"].role == "adapter"


def test_biases_of_an_adapter_are_vectors():
    layer = Lora()
    layer.lora_B["default"] = nn.Linear(RANK, OUTPUTS)  # LoraConfig(lora_bias=True)
    routes = muon_for(in_a_model(layer)).routes
    assert routes["blocks.0.layer0.lora_B.default.bias"].role == "vector"
    assert routes["blocks.0.layer0.lora_B.default.weight"].role == "adapter"


def test_adalora_divides_by_the_rank_in_its_forward_pass():
    layer = Lora(scaling=8.0)
    layer.ranknum = nn.ParameterDict({"default": nn.Parameter(torch.ones(1), requires_grad=False)})
    row = muon_for(in_a_model(layer)).routes["blocks.0.layer0.lora_A.default.weight"]
    assert row.why.endswith("s = 2")


def test_adapters_that_are_not_lora_are_left_to_adamw():
    """The rows of OFT are angles, those of VB-LoRA logits: no matrices of a map."""

    class Layer(Bag):
        adapter_layer_names = ("oft_R", "mix", "modules_to_save")

    layer = Layer(
        base_layer=nn.Linear(16, 16).requires_grad_(False),
        oft_R=nn.ModuleDict({"default": Bag(weight=gaussian(8, 6))}),
        mix=gaussian(4, 6),
        modules_to_save=nn.ModuleDict({"default": nn.Linear(16, 16, bias=False)}),
    )
    routes = muon_for(in_a_model(layer)).routes
    found = {row.name.split(".", 3)[3]: row.role for row in routes if row.algorithm != "left out"}
    assert found == {
        "oft_R.default.weight": "vector",
        "mix": "vector",
        "modules_to_save.default.weight": "hidden",
    }
    assert routes["blocks.0.layer0.mix"].why == "vector: mix of an adapter that is not LoRA"


def test_an_adapted_last_layer_stays_the_head():
    class Adapted(Bag):
        adapter_layer_names = ("lily_A", "lily_B")

    head = Adapted(
        base_layer=nn.Linear(16, 5), lily_A=nn.Linear(16, 4), lily_B=nn.Linear(4, 5, bias=False)
    )
    routes = muon_for(Bag(one=nn.Linear(8, 16), two=nn.Linear(16, 16), head=head)).routes
    assert routes["head.base_layer.weight"].role == "head"
    assert routes["head.lily_B.weight"].role == "vector"


@pytest.mark.parametrize("kind", ["LoHaConfig", "OFTConfig", "IA3Config"])
def test_other_methods_of_the_real_library_are_refused_with_the_remedy(kind):
    peft, transformers = map(pytest.importorskip, ("peft", "transformers"))
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    options = {"IA3Config": {"feedforward_modules": ["mlp.c_proj"], "fan_in_fan_out": True}}
    if kind not in options:  # these adapt linear layers only
        config = transformers.LlamaConfig(
            vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2,
        )  # fmt: skip
        options = {"LoHaConfig": {"r": 2}, "OFTConfig": {"r": 0, "oft_block_size": 4}}
    names = ["c_attn", "mlp.c_proj"] if kind == "IA3Config" else ["q_proj"]
    method = getattr(peft, kind)(target_modules=names, **options[kind])
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config), method)
    with pytest.raises(ValueError, match=r"no parameter of PeftModel would be updated by Muon"):
        muon_for(model)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_the_real_library(options):
    peft, transformers = map(pytest.importorskip, ("peft", "transformers"))
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=8)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, **options
    )
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    optimizer = muon_for(model)
    trained = [row for row in optimizer.routes if row.algorithm != "left out"]
    s = 8 / math.sqrt(4) if options.get("use_rslora") else 2.0
    factors = {
        (row.name.split(".")[-4], row.name.split(".")[-3]): row.factors
        for row in trained
        if row.role == "adapter"
    }
    assert factors == {
        (layer, factor): (pytest.approx(math.sqrt(m) / (2 * s)),)
        for layer, m in (("c_attn", 3), ("c_fc", 4))
        for factor in ("lora_A", "lora_B")
    }
    vectors = [row for row in trained if row.role == "vector"]
    assert len(vectors) == (4 if options.get("use_dora") else 0)
    tokens = torch.randint(60, (2, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
