"""Weights stored inputs × outputs, fused weights and routers are found, and cut along the right side."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.routing.sample_models import WIDTH, Bag, SmallGPT, roles
from tests.spectra import gaussian
from torch import Tensor, nn
from torch.nn import Parameter

from polarstep import AdamW, Exact, Muon, NormalizedRows, muon_for
from polarstep.matrix import MatrixView
from polarstep.routing.anatomy import stored_transposed


class Conv1D(nn.Module):
    """x @ W + b, as GPT-2 has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = Parameter(gaussian(nx, nf)), Parameter(torch.zeros(nf))


class Attention(nn.Module):
    """A fused projection beside the projection back, and whatever else a module says about itself."""

    def __init__(self, name: str, fused: nn.Module, reads: int, **said: object) -> None:
        super().__init__()
        setattr(self, name, fused)
        self.out_proj = nn.Linear(reads, WIDTH)
        for key, value in said.items():
            setattr(self, key, value)


class GPTNeoXAttention(Attention):
    pass


class GptOssExperts(nn.Module):
    def __init__(self, hidden: int = 6, inner: int = 5, experts: int = 3) -> None:
        super().__init__()
        self.hidden_size = hidden
        self.is_transposed, self.is_concatenated = True, False
        self.gate_up_proj = Parameter(gaussian(experts, hidden, 2 * inner))
        self.gate_up_proj_bias = Parameter(torch.zeros(experts, 2 * inner))
        self.down_proj = Parameter(gaussian(experts, inner, hidden))
        self.down_proj_bias = Parameter(torch.zeros(experts, hidden))


def in_a_model(layer: nn.Module) -> nn.Module:
    """The layer in a block of a trunk, with a head after it."""
    return Bag(blocks=nn.ModuleList([Bag(layer=layer)]), head=nn.Linear(WIDTH, 7))


def steps(params: list[Tensor], gradients: list[list[Tensor]], **options: object) -> list[Tensor]:
    optimizer = Muon(params, **({"lr": 0.1, "polar": Exact(), "weight_decay": 0.1} | options))
    for grads in gradients:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in params]


# --- inputs × outputs


@pytest.mark.parametrize("shape", [(12, 4), (4, 12), (3, 12, 4)], ids=str)
@pytest.mark.parametrize("transform", [None, NormalizedRows()], ids=["", "rows normalized"])
@pytest.mark.parametrize("scale", ["spectral", "rms", lambda m, n: m / n])
def test_a_transposed_weight_takes_the_transposed_step(shape, transform, scale):
    start, gradients = gaussian(*shape, seed=1), [gaussian(*shape, seed=k) for k in range(3)]
    options = {"shape_scale": scale, "transform": transform, "lr_factor": 0.5}
    (usual,) = steps([Parameter(start.clone())], [[g] for g in gradients], **options)
    stored = Parameter(start.mT.contiguous())
    (ours,) = steps([stored], [[g.mT] for g in gradients], layout="transposed", **options)
    torch.testing.assert_close(ours.mT, usual)


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({"split_sizes": (6, 3, 3)}, "unequal"),
        ({"split_sizes": (4, 4, 4)}, "equal"),
        ({"split_columns": (1, 3)}, "columns"),
        ({"split_sizes": (2, 1), "split_repeats": 4}, "in turn"),
        ({"split_sizes": (6, 6), "split_columns": (2, 2)}, "both"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_cut_and_transposed_weights_are_their_parts(parts, names, nonfinite):
    """Each part by itself, as a parameter of its own, takes the same steps."""
    start, gradients = gaussian(12, 4, seed=1), [gaussian(12, 4, seed=k) for k in range(3)]
    view = MatrixView.of((12, 4), **parts)
    options = {"nonfinite": nonfinite}
    pieces = [Parameter(block.clone()) for block in view.blocks(start)]
    expected = steps(pieces, [view.blocks(g) for g in gradients], **options)
    for layout in ("stack", "transposed"):
        stored = start.mT.contiguous() if layout == "transposed" else start.clone()
        grads = [[g.mT] if layout == "transposed" else [g] for g in gradients]
        (ours,) = steps([Parameter(stored)], grads, layout=layout, **parts, **options)
        ours = ours.mT if layout == "transposed" else ours
        torch.testing.assert_close(ours, view.assemble(expected, (12, 4)))


def test_gpt2_layers_are_read_the_right_way_round_and_cut_into_q_k_v():
    block = Bag(
        attn=Bag(c_attn=Conv1D(3 * WIDTH, WIDTH), c_proj=Conv1D(WIDTH, WIDTH)),
        mlp=Bag(c_fc=Conv1D(4 * WIDTH, WIDTH), c_proj=Conv1D(WIDTH, 4 * WIDTH)),
    )
    routes = muon_for(Bag(wte=nn.Embedding(50, WIDTH), h=nn.ModuleList([block]))).routes
    found = {row.name[4:]: (row.matrix, row.factors) for row in routes if row.algorithm == "Muon"}
    assert found == {
        "attn.c_attn.weight": ("3·(16×16), stored transposed", (1.0,)),
        "attn.c_proj.weight": ("16×16, stored transposed", (1.0,)),
        "mlp.c_fc.weight": ("64×16, stored transposed", (2.0,)),
        "mlp.c_proj.weight": ("16×64, stored transposed", (0.5,)),
    }
    assert routes["h.0.mlp.c_fc.weight"].why == "hidden: Conv1D (nf = 64 columns)"
    assert "lr 0.02 × 2" in str(routes)
    assert all(row.role in ("hidden", "embedding", "vector") for row in routes)


@pytest.mark.parametrize(
    ("module", "transposed"),
    [
        (Bag(weight=gaussian(4, 6), bias=torch.zeros(6)), True),
        (Bag(weight=gaussian(6, 4), bias=torch.zeros(6)), False),
        (Bag(weight=gaussian(6, 4)), False),
        (Bag(weight=gaussian(6, 6), bias=torch.zeros(6)), False),  # no evidence
        (Conv1D(6, 6), True),  # by its class
        (nn.Linear(4, 6), False),
    ],
)
def test_which_side_has_the_outputs(module, transposed):
    model = Bag(first=module, rest=nn.ModuleList([Bag(a=nn.Linear(6, 6), b=nn.Linear(6, 6))]))
    matrix = muon_for(model).routes["first.weight"].matrix
    assert matrix.endswith(", stored transposed") == transposed


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [("in_features", "out_features"), ("input_size", "output_size"), ("in_dim", "out_dim")],
)
def test_a_layer_states_both_of_its_widths_or_is_read_by_its_bias(inputs, outputs):
    """One width alone may be that of the module around the weight: 4 outputs, and a bias of 6."""
    layer = Bag(weight=gaussian(6, 4), bias=torch.zeros(6))
    setattr(layer, outputs, 4)
    assert stored_transposed(layer, "weight", layer.weight) is None
    setattr(layer, inputs, 6)
    assert stored_transposed(layer, "weight", layer.weight) == f"{outputs} = 4 columns"
    setattr(layer, inputs, 4)
    setattr(layer, outputs, 6)
    assert stored_transposed(layer, "weight", layer.weight) is None


def test_the_outputs_of_a_conv1d_suffice():
    """Older versions of transformers state nf and no nx."""
    layer = Bag(weight=gaussian(6, 4))
    layer.nf = 4
    assert stored_transposed(layer, "weight", layer.weight) == "nf = 4 columns"
    layer.nf = 6
    assert stored_transposed(layer, "weight", layer.weight) is None


def test_experts_that_are_transposed_and_interleaved():
    routes = muon_for(in_a_model(GptOssExperts())).routes
    assert routes["blocks.0.layer.gate_up_proj"].matrix == "6·(5×6), stored transposed"
    assert "interleaved" in routes["blocks.0.layer.gate_up_proj"].why
    assert routes["blocks.0.layer.down_proj"].matrix == "3·(6×5), stored transposed"
    group = routes["blocks.0.layer.gate_up_proj"].group
    assert muon_for(in_a_model(GptOssExperts())).param_groups[group]["split_repeats"] == 5


def test_a_bias_of_other_experts_tells_which_side_has_the_outputs():
    """Experts are stored one way round; here the second matrices have no bias to tell it."""
    first, bias = gaussian(3, 6, 10), torch.zeros(3, 10)
    experts = Bag(up_proj=first, up_proj_bias=bias, down_proj=gaussian(3, 10, 6))
    routes = muon_for(in_a_model(experts)).routes
    assert routes["blocks.0.layer.up_proj"].matrix == "3·(10×6), stored transposed"
    assert routes["blocks.0.layer.down_proj"].matrix == "3·(6×10), stored transposed"
    assert "10 inputs as rows" in routes["blocks.0.layer.down_proj"].why
    experts = Bag(up_proj=first.mT, up_proj_bias=bias, down_proj=gaussian(3, 6, 10))
    routes = muon_for(in_a_model(experts)).routes
    assert routes["blocks.0.layer.up_proj"].matrix == "3·(10×6)"
    assert routes["blocks.0.layer.down_proj"].matrix == "3·(6×10)"


def test_stacked_matrices_of_other_names_are_taken_as_they_are_stored():
    """Zamba's ``x_proj_weight`` reads the width that its module states, and is no expert's matrix."""
    mixer = Bag(x_proj_weight=gaussian(2, 6, 10), down_proj=gaussian(2, 6, 10))
    mixer.hidden_size = 10
    routes = muon_for(in_a_model(mixer)).routes
    assert routes["blocks.0.layer.x_proj_weight"].matrix == "2·(6×10)"
    assert routes["blocks.0.layer.down_proj"].matrix == "2·(10×6), stored transposed"


def test_a_layout_of_the_users_own():
    model = in_a_model(Bag(mix=gaussian(4, 12)))
    routes = muon_for(model, layouts={"*.mix": "transposed"}, splits={"*.mix": 3}).routes
    assert routes["blocks.0.layer.mix"].matrix == "3·(4×4), stored transposed"
    with pytest.raises(ValueError, match=r"layouts\['\*.mix'\]='columns': expected one of auto"):
        muon_for(model, layouts={"*.mix": "columns"})
    with pytest.raises(ValueError, match=r"layouts\['\*.mux'\] matches no parameter"):
        muon_for(model, layouts={"*.mux": "stack"})


def test_a_pattern_that_matches_nothing_is_told_the_names_of_matrices():
    """The remedy names no bias, though the name of one may be nearer."""
    model = in_a_model(Bag(proj=nn.Linear(WIDTH, WIDTH)))
    for options in ({"layouts": {"*.proj": "transposed"}}, {"splits": {"*.proj": 2}}):
        with pytest.raises(ValueError, match="matches no parameter of two dim") as refused:
            muon_for(model, **options)
        assert "proj.weight" in str(refused.value)
        assert "bias" not in str(refused.value)


# --- fused


@pytest.mark.parametrize(
    ("layer", "matrix"),
    [
        (Attention("qkv_proj", nn.Linear(WIDTH, 32), 16), "16×16 + 8×16 + 8×16"),
        (Attention("qkv_proj", nn.Linear(WIDTH, 24), 16), "16×16 + 4×16 + 4×16"),
        (Attention("Wqkv", nn.Linear(WIDTH, 48), 16), "3·(16×16)"),
        (Attention("c_attn", nn.Linear(WIDTH, 32), 16, q_attn=nn.Linear(16, 16)), "2·(16×16)"),
        (Attention("kv", nn.Linear(WIDTH, 48), 24), "2·(24×16)"),
        (Attention("in_proj", nn.Linear(WIDTH, 64), 32), "2·(32×16)"),
        (Attention("in_proj", nn.Linear(WIDTH, 64), 64), "64×16"),  # nothing fused here
        (Attention("gate_up_proj", nn.Linear(WIDTH, 40), 20), "2·(20×16)"),
        (Attention("qkv_proj", nn.Linear(WIDTH, 26), 16), "26×16"),  # no parts that add up
        (Attention("query_key_value", nn.Linear(WIDTH, 48), 16), "48×16"),  # in which order?
        (GPTNeoXAttention("query_key_value", nn.Linear(WIDTH, 48), 16, num_heads=4), "3·(16×16)"),
        (Bag(qkv=nn.Linear(WIDTH, 48)), "3·(16×16)"),
        (Bag(qkv=nn.Linear(WIDTH, 64)), "64×16"),
        (Attention("qkv", nn.Linear(WIDTH, 33), 16), "1×16 + 16×16 + 16×16"),  # one query
        (Attention("att_proj", nn.Linear(WIDTH, 48), 16), "3·(16×16)"),
        (Attention("qk", nn.Linear(WIDTH, 32), 16), "2·(16×16)"),
        (Attention("in_proj", nn.Linear(WIDTH, 88), 16, in_split=[40, 16, 16, 16]),
         "40×16 + 16×16 + 16×16 + 16×16"),
    ],
)  # fmt: skip
def test_shapes_decide_how_a_fused_weight_is_cut(layer, matrix):
    name = next(name for name, child in layer.named_children() if name != "q_attn")
    row = muon_for(in_a_model(layer)).routes[f"blocks.0.layer.{name}.weight"]
    assert row.matrix == matrix
    whole = "·" not in matrix and "+" not in matrix
    assert ("splits={…}" in row.why) == (whole and "in_proj" not in name)


def test_a_layout_of_the_users_keeps_the_name_of_what_it_lays_out():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Conv2d(4, 6, 3), nn.Linear(6, 2))
    before = muon_for(model).routes
    after = muon_for(model, layouts={"0.in_proj_weight": "auto", "1.weight": "conv"}).routes
    for name, layout in (("0.in_proj_weight", "auto"), ("1.weight", "conv")):
        assert after[name].why == f"{before[name].why}, {layout} by layouts['{name}']"


def test_the_first_layer_of_an_mlp_without_a_gate_is_whole():
    """T5 calls it wi, as ModernBERT calls its gate and up; here all its outputs are read."""
    mlp = Bag(wi=nn.Linear(WIDTH, 40), wo=nn.Linear(40, WIDTH))
    assert muon_for(in_a_model(mlp)).routes["blocks.0.layer.wi.weight"].why == "hidden: Linear"
    mlp = Bag(Wi=nn.Linear(WIDTH, 40), Wo=nn.Linear(20, WIDTH))
    row = muon_for(in_a_model(mlp)).routes["blocks.0.layer.Wi.weight"]
    assert row.matrix == "2·(20×16)"


def test_parts_that_come_head_by_head():
    layer = GPTNeoXAttention("query_key_value", nn.Linear(WIDTH, 48), 16, num_heads=4)
    optimizer = muon_for(in_a_model(layer))
    row = optimizer.routes["blocks.0.layer.query_key_value.weight"]
    assert row.why == "hidden: Linear: q, k, v of query_key_value, head by head"
    group = optimizer.param_groups[row.group]
    assert (group["split_sizes"], group["split_repeats"]) == ((4, 4, 4), 4)


class DisentangledSelfAttention(Attention):
    pass


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        # LeViT, TinyViT and EfficientFormer state the widths of one head
        (Attention("qkv", nn.Linear(WIDTH, 64), 32, num_heads=4, key_dim=4, val_dim=8), (4, 4, 8)),
        (Attention("qkv", nn.Linear(WIDTH, 48), 16, num_heads=4, key_dim=4, val_dim=4), (4, 4, 4)),
        (Attention("queries_keys_values", nn.Linear(WIDTH, 64), 32,
                   num_attention_heads=4, key_dim=4, attention_ratio=2), (4, 4, 8)),
        (Attention("kv", nn.Linear(WIDTH, 48), 32, num_heads=4, key_dim=4, val_dim=8), (4, 8)),
        # CoAtNet and MaxViT of timm say that heads come first
        (Attention("qkv", nn.Linear(WIDTH, 48), 16, num_heads=4, dim_head=4, head_first=True),
         (4, 4, 4)),
        (DisentangledSelfAttention("in_proj", nn.Linear(WIDTH, 48), 16, num_attention_heads=4),
         (4, 4, 4)),
    ],
)  # fmt: skip
def test_attributes_tell_that_parts_come_head_by_head(layer, parts):
    """Cut into q, k and v one after the other, every matrix would mix all three."""
    optimizer = muon_for(in_a_model(layer))
    name = next(name for name, _ in layer.named_children())
    row = optimizer.routes[f"blocks.0.layer.{name}.weight"]
    assert row.why.endswith("head by head")
    group = optimizer.param_groups[row.group]
    assert (group["split_sizes"], group["split_repeats"]) == (parts, 4)


def test_groups_of_heads_in_torchtitan():
    """Two query heads, a key and a value for each of three groups."""
    fused = Bag(wqkv=nn.Linear(WIDTH, 48))
    fused.heads_per_kv, fused.r_dim, fused.head_dim = 2, 4, 4
    layer = Bag(qkv_linear=fused, wo=nn.Linear(24, WIDTH))
    optimizer = muon_for(in_a_model(layer))
    row = optimizer.routes["blocks.0.layer.qkv_linear.wqkv.weight"]
    assert row.matrix == "24×16 + 12×16 + 12×16"
    group = optimizer.param_groups[row.group]
    assert (group["split_sizes"], group["split_repeats"]) == ((8, 4, 4), 3)


def test_latent_attention_is_cut_under_either_name():
    for name in ("kv_b_proj", "wkv_b"):
        said = {"n_heads": 3, "qk_nope_head_dim": 4, "v_head_dim": 6}
        layer = Attention(name, nn.Linear(WIDTH, 30), 18, **said)
        row = muon_for(in_a_model(layer)).routes[f"blocks.0.layer.{name}.weight"]
        assert (row.matrix, row.why) == (
            "12×16 + 18×16",
            f"hidden: Linear: k, v of {name}, head by head",
        )


def test_heads_that_do_not_come_first_are_cut_as_usual():
    layer = Attention("qkv", nn.Linear(WIDTH, 48), 16, num_heads=4, dim_head=4, head_first=False)
    assert muon_for(in_a_model(layer)).routes["blocks.0.layer.qkv.weight"].why == (
        "hidden: Linear: q, k, v of qkv"
    )


def test_a_fused_convolution_is_cut_as_a_linear_layer_is():
    layer = Bag(qkv=nn.Conv2d(WIDTH, 48, 1), proj=nn.Conv2d(WIDTH, WIDTH, 1))
    row = muon_for(in_a_model(layer)).routes["blocks.0.layer.qkv.weight"]
    assert (row.matrix, row.why) == ("3·(16×16)", "hidden: filters of a Conv2d: q, k, v of qkv")
    layer = Bag(qkv=nn.Conv1d(WIDTH, 48, 3), proj=nn.Conv1d(WIDTH, WIDTH, 1))
    assert muon_for(in_a_model(layer)).routes["blocks.0.layer.qkv.weight"].matrix == "3·(16×48)"
    layer = Bag(qkv=nn.Conv2d(WIDTH, 50, 1), proj=nn.Conv2d(WIDTH, WIDTH, 1))
    assert "splits={…}" in muon_for(in_a_model(layer)).routes["blocks.0.layer.qkv.weight"].why


def test_the_name_of_a_layer_with_its_norm_says_that_it_is_fused():
    def with_norm(outputs: int) -> nn.Module:
        return Bag(conv=nn.Conv2d(WIDTH, outputs, 1), norm=nn.BatchNorm2d(outputs))

    layer = Bag(qkv=with_norm(48), proj=with_norm(WIDTH))
    routes = muon_for(in_a_model(layer)).routes
    assert routes["blocks.0.layer.qkv.conv.weight"].matrix == "3·(16×16)"
    assert routes["blocks.0.layer.proj.conv.weight"].matrix == "16×16"
    two = Bag(qkv=Bag(first=nn.Linear(WIDTH, 48), second=nn.Linear(48, 48)))
    assert muon_for(in_a_model(two)).routes["blocks.0.layer.qkv.first.weight"].matrix == "48×16"


def test_attributes_tell_the_parts_where_no_layer_reads_them():
    fused = Bag(qkv=nn.Linear(WIDTH, 40))
    fused.config = SimpleNamespace(num_attention_heads=6, num_kv_heads=2, head_dim=4)
    assert muon_for(in_a_model(fused)).routes["blocks.0.layer.qkv.weight"].matrix == (
        "24×16 + 8×16 + 8×16"
    )


def test_heads_are_cut_along_rows_and_columns():
    block = Bag(q=nn.Linear(WIDTH, WIDTH), o=nn.Linear(WIDTH, WIDTH))
    routes = muon_for(
        in_a_model(block),
        splits={"*.q.weight": 4, "*.o.weight": {"columns": 4}},
    ).routes
    assert routes["blocks.0.layer.q.weight"].matrix == "4·(4×16)"
    assert routes["blocks.0.layer.o.weight"].matrix == "4·(16×4)"
    whole = muon_for(SmallGPT("untied"), splits={"*.qkv.weight": 1}).routes
    assert whole["blocks.0.qkv.weight"].matrix == "48×16"


GROUPED = in_a_model(Attention("qkv_proj", nn.Linear(WIDTH, 48), 24))
BY_HEAD = in_a_model(GPTNeoXAttention("query_key_value", nn.Linear(WIDTH, 48), 16, num_heads=4))


@pytest.mark.parametrize(
    ("model", "splits", "error", "message"),
    [
        (GROUPED, {"*qkv*": 3}, ValueError, r"parts of 24, 12, 12 rows, as the layers around"),
        (GROUPED, {"*qkv*": 5}, ValueError, r"has 48 rows, which 5 does not divide"),
        (GROUPED, {"*qkv*": True}, TypeError, r"=True: expected the number of equal parts, or the"),
        (GROUPED, {"*qkv*": (24, 12)}, ValueError, r"sum to 36, but the weight has 48 rows"),
        (
            GROUPED,
            {"*qkv*": {"columns": 3}},
            ValueError,
            r"\['\*qkv\*'\]\[\"columns\"\]=3: .* 16 columns, which 3 does not divide; .* as \(8, 8\)",
        ),
        (
            in_a_model(Attention("c_attn", Conv1D(48, WIDTH), WIDTH)),
            {"*c_attn.weight": 5},
            ValueError,
            r"has 48 outputs, which 5 does not divide; give the outputs of each part, as \(24, 24\)",
        ),
        (GROUPED, {"*qkv*": {"colums": 4}}, ValueError, r'expected "rows", "columns" or "repeats"'),
        (GROUPED, {"*qkv*": {"repeats": 5}}, ValueError, r"repeats=5.*48 outputs"),
        (GROUPED, {"*qkv*": "3"}, TypeError, "number of equal parts, or the rows of each"),
        (
            BY_HEAD,
            {"*query*": {"repeats": 4}},
            ValueError,
            r"repeats=4 and \"rows\": None: expected",
        ),
        (BY_HEAD, {"*query*": 3}, ValueError, r"3 parts in turn, 4 times.*\"repeats\": 4"),
    ],
)
def test_cuts_that_cannot_be_right_are_refused(model, splits, error, message):
    with pytest.raises(error, match=message):
        muon_for(model, splits=splits)


class Selective(nn.Module):
    """The layers of Mamba's mixer around its state: Δ, B and C come from one projection."""

    def __init__(self, rank: int = 4, states: int = 6, inner: int = 2 * WIDTH) -> None:
        super().__init__()
        self.x_proj = nn.Linear(inner, rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.zeros(inner, states))


def test_the_projection_to_the_state_of_mamba_is_cut():
    row = muon_for(in_a_model(Selective())).routes["blocks.0.layer.x_proj.weight"]
    assert row.matrix == " + ".join(f"{rows}×{2 * WIDTH}" for rows in (4, 6, 6))
    assert row.why == "hidden: Linear: Δ, B, C of x_proj"
    other = Selective()
    other.x_proj = nn.Linear(2 * WIDTH, 15, bias=False)  # no such sum of parts
    route = muon_for(in_a_model(other)).routes["blocks.0.layer.x_proj.weight"]
    assert route.matrix == f"15×{2 * WIDTH}"


# --- routers


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (Bag(gate=nn.Linear(WIDTH, 4), experts=nn.ModuleList(nn.Linear(16, 16) for _ in range(4))),
         "gate.weight"),
        (Bag(gate=Bag(weight=gaussian(3, WIDTH)), experts=GptOssExperts()), "gate.weight"),
        (Bag(router=Bag(layer=nn.Linear(WIDTH, 5)), mix=nn.Linear(16, 16)), "router.layer.weight"),
    ],
)  # fmt: skip
def test_routers_are_left_to_adamw(layer, name):
    optimizer = muon_for(in_a_model(layer), routers=AdamW(lr=7e-3))
    row = optimizer.routes[f"blocks.0.layer.{name}"]
    assert (row.role, row.algorithm) == ("router", "AdamW")
    assert row.factors == (pytest.approx(0.35),)  # 7e-3 at lr = 0.02
    assert "in its name" in row.why


def test_the_gate_of_an_mlp_is_a_hidden_matrix():
    block = Bag(gate=nn.Linear(WIDTH, 40), up=nn.Linear(WIDTH, 40), down=nn.Linear(40, WIDTH))
    assert roles(muon_for(in_a_model(block)))["blocks.0.layer.gate.weight"] == "hidden"
    block.num_experts = 40  # as many experts around it as it has outputs, as in Qwen3-Next
    assert roles(muon_for(in_a_model(block)))["blocks.0.layer.gate.weight"] == "hidden"
    assert (
        roles(muon_for(in_a_model(Bag(gate=nn.Linear(WIDTH, 5), mix=nn.Linear(16, 16)))))[
            "blocks.0.layer.gate.weight"
        ]
        == "hidden"
    )


# --- the real libraries


def test_language_models_of_transformers():
    transformers = pytest.importorskip("transformers")

    def views(config: object) -> dict[str, str]:
        model = transformers.AutoModelForCausalLM.from_config(config)
        return {row.name.split(".", 3)[-1]: row.matrix for row in muon_for(model).routes}

    small = {"vocab_size": 100, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    gpt2 = views(transformers.GPT2Config(vocab_size=100, n_embd=24, n_layer=1, n_head=4))
    assert gpt2["attn.c_attn.weight"] == "3·(24×24), stored transposed"
    assert gpt2["mlp.c_fc.weight"] == "96×24, stored transposed"
    phi = views(
        transformers.Phi3Config(
            **small, num_key_value_heads=2, intermediate_size=40, pad_token_id=0
        )
    )
    assert phi["self_attn.qkv_proj.weight"] == "24×24 + 12×24 + 12×24"
    assert phi["mlp.gate_up_proj.weight"] == "2·(40×24)"
    neox = views(transformers.GPTNeoXConfig(**small, intermediate_size=48))
    assert neox["attention.query_key_value.weight"] == "3·(24×24)"
    moe = {"num_key_value_heads": 2, "num_local_experts": 3, "intermediate_size": 40}
    oss = views(transformers.GptOssConfig(**small, **moe, head_dim=8))
    assert oss["mlp.experts.gate_up_proj"] == "6·(40×24), stored transposed"
    mixtral = views(transformers.MixtralConfig(**small, **moe))
    assert mixtral["mlp.experts.gate_up_proj"] == "6·(40×24)"
