"""``per_head``: each head of attention has a polar factor of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.routing.sample_models import WIDTH, Bag
from tests.spectra import gaussian
from torch import Tensor, nn

from polarstep import Exact, muon_for
from polarstep_lab.models.gpt import GPT, GPTConfig

HEADS = 4


def attention(heads: int | None = HEADS, kv: int | None = None, **layers: nn.Module) -> nn.Module:
    module = Bag(**layers)
    if heads is not None:
        module.num_heads = heads
    if kv is not None:
        module.num_key_value_heads = kv
    return module


def linear(outputs: int, inputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def separate(heads: int | None = HEADS, kv: int | None = None) -> nn.Module:
    narrow = WIDTH if kv is None else WIDTH // (heads or 1) * kv
    parts = {"q_proj": WIDTH, "k_proj": narrow, "v_proj": narrow, "o_proj": WIDTH}
    return attention(heads, kv, **{name: linear(size) for name, size in parts.items()})


def model_of(*layers: nn.Module) -> nn.Module:
    blocks = [Bag(attn=layer, mlp=Bag(c_fc=linear(64), c_proj=linear(16, 64))) for layer in layers]
    return Bag(wte=nn.Embedding(50, WIDTH), blocks=nn.ModuleList(blocks), head=linear(50))


def matrices(layer: nn.Module, **options: object) -> dict[str, str]:
    routes = muon_for(model_of(layer), **({"per_head": True} | options)).routes
    return {
        row.name.removeprefix("blocks.0.attn."): row.matrix for row in routes if "attn" in row.name
    }


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = {name: linear(WIDTH) for name in ("query", "key", "value")}
        self.attention = Bag(output=Bag(dense=linear(WIDTH)))
        self.attention.add_module("self", attention(**inner))


class GPTNeoXAttention(Bag):
    pass


def by_groups(groups: int, queries: int, width: int) -> nn.Module:
    """As torchtitan: the query heads of a group, then its key and value."""
    fused = Bag(wqkv=linear(groups * (queries + 2) * width))
    fused.heads_per_kv, fused.head_dim = queries, width
    return attention(
        groups * queries, groups, qkv_linear=fused, wo=linear(16, groups * queries * width)
    )


def neox() -> nn.Module:
    layer = GPTNeoXAttention(query_key_value=linear(48), dense=linear(16))
    layer.num_heads = HEADS
    return layer


def latent() -> nn.Module:
    layer = attention(
        2, q_b_proj=linear(2 * 12, 8), kv_a_proj_with_mqa=linear(10), kv_b_proj=linear(2 * 14, 6),
        o_proj=linear(16, 2 * 6),
    )  # fmt: skip
    layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim = 8, 4, 6
    return layer


def gated() -> nn.Module:
    layer = separate()
    layer.q_proj, layer.head_dim = linear(2 * WIDTH), WIDTH // HEADS
    return layer


def by_configuration() -> nn.Module:
    layer = separate(heads=None)
    layer.config = SimpleNamespace(num_attention_heads=HEADS)
    return layer


class Megatron(Bag):
    hidden_size_per_attention_head = 4
    num_attention_heads_per_partition, num_query_groups_per_partition = 4, 2

    def __init__(self) -> None:
        super().__init__(linear_qkv=linear(32), linear_proj=linear(16))
        self.config = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=4)


def delta(**layers: nn.Module) -> nn.Module:
    """Linear attention as Qwen3.5's, with twice as many heads of v as of q and k."""
    layer = attention(heads=None, **layers, out_proj=linear(WIDTH, 32))
    layer.num_k_heads, layer.num_v_heads, layer.key_dim, layer.value_dim = 4, 8, 16, 32
    return layer


EACH, BACK = "4·(4×16)", "4·(16×4)"
LAYERS = {
    "separate": (
        separate,
        {"q_proj": EACH, "k_proj": EACH, "v_proj": EACH, "o_proj": BACK},
    ),
    "fewer keys": (
        lambda: separate(kv=2),
        {"q_proj": EACH, "k_proj": "2·(4×16)", "v_proj": "2·(4×16)", "o_proj": BACK},
    ),
    "one key": (lambda: separate(kv=1), {"k_proj": "4×16", "v_proj": "4×16", "o_proj": BACK}),
    "by configuration": (by_configuration, {"q_proj": EACH, "o_proj": BACK}),
    "fused": (
        lambda: attention(c_attn=linear(48), c_proj=linear(16)),
        {"c_attn": "12·(4×16)", "c_proj": BACK},
    ),
    "fused, fewer keys": (
        lambda: attention(kv=2, qkv_proj=linear(32), o_proj=linear(16)),
        {"qkv_proj": "8·(4×16)", "o_proj": BACK},
    ),
    "head by head": (neox, {"query_key_value": "12·(4×16)", "dense": BACK}),
    "by groups": (
        lambda: by_groups(3, 2, 4),
        {"qkv_linear.wqkv": "12·(4×16)", "wo": "6·(16×4)"},
    ),
    "Megatron": (Megatron, {"linear_qkv": "8·(4×16)", "linear_proj": BACK}),
    "latent": (
        latent,
        {
            "q_b_proj": "2·(12×8)",
            "kv_a_proj_with_mqa": "10×16",
            "kv_b_proj": "8×6 + 6×6 + 8×6 + 6×6",
            "o_proj": "2·(16×6)",
        },
    ),
    "gated": (gated, {"q_proj": "8·(4×16)", "o_proj": BACK}),
    "BERT": (Bert, {"attention.self.query": EACH, "attention.output.dense": BACK}),
    "a list around o": (
        lambda: attention(to_q=linear(16), to_out=nn.ModuleList([linear(16), nn.Dropout()])),
        {"to_q": EACH, "to_out.0": BACK},
    ),
    "linear attention": (
        lambda: delta(in_proj_qkv=linear(64)),
        {"in_proj_qkv": "16·(4×16)", "out_proj": "8·(16×4)"},
    ),
    "linear attention, apart": (
        lambda: delta(q_proj=linear(16), k_proj=linear(16), v_proj=linear(32)),
        {"q_proj": EACH, "k_proj": EACH, "v_proj": "8·(4×16)", "out_proj": "8·(16×4)"},
    ),
    "convolutions": (
        lambda: attention(qkv=nn.Conv2d(16, 48, 1, bias=False), proj=nn.Conv2d(16, 16, 1, bias=False)),
        {"qkv": "12·(4×16)", "proj": BACK},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_projections_are_cut_into_heads(case):
    build, expected = LAYERS[case]
    found = matrices(build())
    assert {name: found[f"{name}.weight"] for name in expected} == expected


def test_other_layers_of_a_block_are_whole_and_the_table_says_what_is_cut():
    routes = muon_for(model_of(separate()), per_head=True).routes
    assert routes["blocks.0.mlp.c_proj.weight"].matrix == "16×64"
    assert routes["blocks.0.mlp.c_fc.weight"].why == "hidden: Linear"
    assert routes["blocks.0.attn.o_proj.weight"].why == "hidden: Linear, per head"


def test_torchs_own_attention():
    found = muon_for(
        Bag(a=nn.MultiheadAttention(WIDTH, HEADS), last=linear(3)), per_head=True
    ).routes
    assert found["a.in_proj_weight"].matrix == "12·(4×16)"
    assert found["a.out_proj.weight"].matrix == BACK


def test_bare_parameters_with_heads():
    """TransformerLens stacks a matrix for each head; XLNet has heads side by side."""
    lens = Bag(W_Q=torch.ones(4, 16, 8), W_O=torch.ones(4, 8, 16))
    lens.num_heads = HEADS
    xlnet = Bag(q=torch.ones(16, 4, 4), o=torch.ones(16, 4, 4))
    xlnet.n_head, xlnet.d_head = HEADS, 4
    routes = muon_for(model_of(lens, xlnet), per_head=True).routes
    assert routes["blocks.0.attn.W_Q"].matrix == "4·(16×8)"
    assert routes["blocks.1.attn.q"].matrix == routes["blocks.1.attn.o"].matrix == "4·(16×4)"


def test_some_projections_alone():
    found = matrices(separate(), per_head=("q", "k"))
    assert list(found.values()) == [EACH, EACH, "16×16", "16×16"]
    fused = attention(c_attn=linear(48), c_proj=linear(16))
    assert matrices(fused, per_head=["v"])["c_attn.weight"] == "16×16 + 16×16 + " + " + ".join(
        ["4×16"] * 4
    )
    assert matrices(separate(), per_head=False) == matrices(separate(), per_head=())
    assert set(matrices(separate(), per_head=False).values()) == {"16×16"}


def test_splits_and_rules_come_first():
    found = matrices(separate(), splits={"*.q_proj.weight": 1})
    assert found["q_proj.weight"] == "16×16"
    assert found["k_proj.weight"] == EACH
    routes = muon_for(model_of(separate()), per_head=True, rules=[("*q_proj*", None)]).routes
    assert routes["blocks.0.attn.q_proj.weight"].algorithm == "left out"


@pytest.mark.parametrize("side", ["outputs", "inputs"])
def test_a_step_is_that_of_the_heads_by_themselves(side):
    model = model_of(separate())
    optimizer = muon_for(
        model,
        0.1,
        polar=Exact(),
        transform=None,
        weight_decay=0.0,
        shape_scale="none",
        per_head=True,
    )
    layer = model.blocks[0].attn.q_proj if side == "outputs" else model.blocks[0].attn.o_proj
    before = layer.weight.detach().clone()
    G = gaussian(WIDTH, WIDTH).float()
    layer.weight.grad = G
    optimizer.step()
    heads = G.split(4, dim=0 if side == "outputs" else 1)

    def polar(head: Tensor) -> Tensor:
        U, _, Vh = torch.linalg.svd(head, full_matrices=False)
        return U @ Vh

    T = torch.cat([polar(head) for head in heads], dim=0 if side == "outputs" else 1)
    torch.testing.assert_close(layer.weight.detach(), before - 0.1 * T, rtol=0, atol=1e-5)


def test_the_laboratorys_gpt_has_heads():
    routes = muon_for(GPT(GPTConfig(50, 32, 2, 4, 8)), per_head=True).routes
    cut = {row.name: row.matrix for row in routes if row.why.endswith("per head")}
    assert len(cut) == 8
    assert set(cut.values()) == {"4·(8×32)", "4·(32×8)"}


def without_number() -> nn.Module:
    return separate(heads=None)


@pytest.mark.parametrize(
    ("layer", "per_head", "words"),
    [
        (without_number, True, r'a number such as num_heads.*splits=\{"blocks\.0\.attn\.q_proj'),
        (lambda: separate(3), True, r"q_proj\.weight has a side of 16, which 3 heads do not divide"),
        (lambda: Bag(up=linear(16)), True, r"per_head: no projection of attention was found in Bag"),
        (lambda: attention(query_key_value=linear(48)), True, r"no shape says which rows are q, k"),
        (neox, ("q",), r"has its q, k, v head by head, so that all or none .*: expected 'q', 'k', 'v'"),
        (separate, ("q", "heads"), r"per_head=\('q', 'heads'\): expected True, False or some of 'q'"),
        (separate, "q", r"per_head='q': expected True, False or some of"),
    ],
)  # fmt: skip
def test_errors_say_what_to_give(layer, per_head, words):
    with pytest.raises(ValueError, match=words):
        muon_for(model_of(layer()), per_head=per_head)


def test_the_remedy_for_a_missing_number_works():
    model = model_of(without_number())
    model.get_submodule("blocks.0.attn").num_heads = HEADS
    assert muon_for(model, per_head=True).routes["blocks.0.attn.q_proj.weight"].matrix == EACH


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Bert", "DeepseekV3"])
def test_the_real_library(kind):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    own = {
        "GPT2": {"vocab_size": 60, "n_embd": 32, "n_layer": 1, "n_head": 4},
        "Llama": small | {"num_key_value_heads": 2, "intermediate_size": 40},
        "Bert": small | {"intermediate_size": 40},
        "DeepseekV3": small | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
                               "q_lora_rank": 12, "kv_lora_rank": 10, "first_k_dense_replace": 1},
    }[kind]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**own)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    cut = [row.matrix for row in muon_for(model, per_head=True).routes if "per head" in row.why]
    assert (
        cut
        == {
            "GPT2": ["12·(8×32), stored transposed", "4·(32×8), stored transposed"],
            "Llama": ["4·(8×32)", "2·(8×32)", "2·(8×32)", "4·(32×8)"],
            "Bert": ["4·(8×32)"] * 3 + ["4·(32×8)"],
            "DeepseekV3": ["4·(12×12)", " + ".join(["8×10 + 6×10"] * 4), "4·(32×6)"],
        }[kind]
    )


@pytest.mark.parametrize("scale", ["fan-ratio", "spectral", "rms", "none"])
@pytest.mark.parametrize(
    "layer", [separate, lambda: attention(c_attn=linear(48), c_proj=linear(16))]
)
def test_a_step_is_as_long_as_without(scale, layer):
    """Else the heads of the projection back, which are added up, would each take a longer step."""
    moved = {}
    for per_head in (False, True):
        torch.manual_seed(0)
        model = model_of(layer()).double()
        optimizer = muon_for(
            model,
            0.1,
            polar=Exact(),
            transform=None,
            weight_decay=0.0,
            shape_scale=scale,
            per_head=per_head,
        )
        attn = model.blocks[0].attn
        before = [p.detach().clone() for p in attn.parameters()]
        for i, p in enumerate(attn.parameters()):
            p.grad = gaussian(*p.shape, seed=i)
        optimizer.step()
        pairs = zip(attn.parameters(), before, strict=True)
        moved[per_head] = torch.stack([torch.linalg.norm(p.detach() - q) for p, q in pairs])
    torch.testing.assert_close(moved[True], moved[False])
