"""How a weight is read as matrices: which side has the outputs, and which parts are fused in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.routing.sample_models import WIDTH, Bag, SmallGPT, mlp
from tests.spectra import gaussian
from torch import Tensor, nn
from torch.nn import Parameter

from polarstep import Exact, Muon, NormalizedRows, muon_for
from polarstep.matrix import MatrixView


def linear(outputs: int, inputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def said(module: nn.Module, **attributes: object) -> nn.Module:
    """A module with what it says of itself."""
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class Conv1D(nn.Module):
    """x @ W + b, as GPT-2 has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = Parameter(gaussian(nx, nf)), Parameter(torch.zeros(nf))


class Attention(Bag):
    """A fused projection beside the projection back, and whatever else a module says about itself."""

    def __init__(self, reads: int = WIDTH, /, **parts: object) -> None:
        layers = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        super().__init__(**layers, out_proj=linear(WIDTH, reads))
        said(self, **{name: part for name, part in parts.items() if name not in layers})


class GPTNeoXAttention(Attention):
    pass


class DisentangledSelfAttention(Attention):
    pass


def in_a_model(layer: nn.Module) -> nn.Module:
    """The layer in a block of a trunk, with a head after it."""
    return Bag(blocks=nn.ModuleList([Bag(layer=layer)]), head=linear(7))


def row_of(layer: nn.Module, name: str, **options: object):
    return muon_for(in_a_model(layer), **options).routes[f"blocks.0.layer.{name}"]


@pytest.mark.parametrize(
    ("layer", "factor"),
    [
        (nn.Conv2d(8, 8, 3, padding=1), 3.0),
        (nn.Conv2d(8, 8, 3, stride=2, padding=1), 3.0),
        (nn.Conv2d(8, 8, (1, 4)), 2.0),
        (nn.ConvTranspose2d(8, 8, 3, padding=1), 3.0),
        (nn.Conv2d(8, 8, 1), 1.0),
        (nn.Conv2d(8, 8, 4, stride=4), 1.0),  # patches
        (nn.Linear(8, 8), 1.0),
    ],
)
def test_the_inputs_of_a_convolution_are_its_channels(layer, factor):
    for shape_scale, expected in (("fan-ratio", factor), ("spectral", 1.0)):
        optimizer = muon_for(in_a_model(layer), shape_scale=shape_scale)
        (group,) = [
            g for g in optimizer.param_groups if any(p is layer.weight for p in g["params"])
        ]
        assert group["lr_factor"] == expected


def test_a_rule_with_its_own_scale_has_no_factor_for_channels():
    rule = ("*.layer.weight", {"shape_scale": "spectral"})
    optimizer = muon_for(in_a_model(nn.Conv2d(8, 8, 3)), rules=[rule])
    (group,) = [g for g in optimizer.param_groups if g.get("shape_scale") == "spectral"]
    assert group["lr_factor"] == 1.0


# --- layers of torch

TORCH = {
    "convolution": (lambda: nn.Conv2d(3, 8, 3), "weight", "8×27"),
    "one-dimensional convolution": (lambda: nn.Conv1d(4, 8, 3), "weight", "8×12"),
    "three-dimensional convolution": (lambda: nn.Conv3d(6, 5, 2), "weight", "5×48"),
    "groups": (lambda: nn.Conv2d(8, 12, 3, groups=4), "weight", "4·(3×18)"),
    "transposed convolution": (lambda: nn.ConvTranspose2d(12, 6, 2, groups=2), "weight", "2·(6×12)"),
    "attention": (lambda: nn.MultiheadAttention(16, 2), "in_proj_weight", "3·(16×16)"),
    "attention, back": (lambda: nn.MultiheadAttention(16, 2), "out_proj.weight", "16×16"),
    "LSTM": (lambda: nn.LSTM(6, 8), "weight_ih_l0", "4·(8×6)"),
    "GRU": (lambda: nn.GRU(6, 8), "weight_ih_l0", "3·(8×6)"),
    "LSTM's cell": (lambda: nn.LSTMCell(6, 8), "weight_ih", "4·(8×6)"),
    "GRU's cell": (lambda: nn.GRUCell(6, 8), "weight_ih", "3·(8×6)"),
    "plain recurrence": (lambda: nn.RNN(6, 8), "weight_hh_l0", "8×8"),
    "projected LSTM": (lambda: nn.LSTM(6, 8, proj_size=5), "weight_hh_l0", "4·(8×5)"),
    "its projection": (lambda: nn.LSTM(6, 8, proj_size=5), "weight_hr_l0", "5×8"),
    "bilinear": (lambda: nn.Bilinear(4, 6, 8), "weight", "8·(4×6)"),
}  # fmt: skip


@pytest.mark.parametrize("case", TORCH)
def test_layers_of_torch(case):
    build, name, matrix = TORCH[case]
    assert row_of(build(), name).matrix == matrix


def test_a_rule_that_sends_a_convolutional_head_to_muon_keeps_its_form():
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Conv1d(8, 4, 3, groups=2))
    row = muon_for(model, rules=[("1.*", "muon")]).routes["1.weight"]
    assert (row.matrix, row.role) == ("2·(2×12)", "head")


def test_a_parameter_with_heads_inside_is_one_matrix():
    """XLNet's projections are (width, heads, width of a head)."""
    attention = said(Bag(q=gaussian(12, 3, 4), seg_embed=torch.zeros(2, 3, 4)), n_head=3, d_head=4)
    row = row_of(attention, "q")
    assert row.matrix == "12×12"
    assert "3 heads side by side" in row.why
    assert row_of(attention, "seg_embed").role == "embedding"
    assert row_of(said(attention, n_head=4), "q").matrix == "12·(3×4)"


# --- inputs × outputs


def steps(params: list[Tensor], gradients: list[list[Tensor]], **options: object) -> list[Tensor]:
    optimizer = Muon(params, **({"lr": 0.1, "polar": Exact(), "weight_decay": 0.1} | options))
    for grads in gradients:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in params]


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
    "parts",
    [
        {"split_sizes": (6, 3, 3)},
        {"split_sizes": (4, 4, 4)},
        {"split_columns": (1, 3)},
        {"split_sizes": (2, 1), "split_repeats": 4},
        {"split_sizes": (6, 6), "split_columns": (2, 2)},
    ],
    ids=["unequal", "equal", "columns", "in turn", "both"],
)
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_cut_and_transposed_weights_are_their_parts(parts, nonfinite):
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


def weight(*shape: int, bias: int = 0, **attributes: object) -> nn.Module:
    layer = Bag(weight=gaussian(*shape), **({"bias": torch.zeros(bias)} if bias else {}))
    return said(layer, **attributes)


TRANSPOSED = {
    "bias as long as the columns": (weight(4, 6, bias=6), True),
    "bias as long as the rows": (weight(6, 4, bias=6), False),
    "no bias": (weight(6, 4), False),
    "square": (weight(6, 6, bias=6), False),
    "square, by its class": (Conv1D(6, 6), True),
    "torch's": (linear(6, 4), False),
    "one width alone": (weight(6, 4, bias=6, out_features=4), False),
    "both widths": (weight(6, 4, bias=6, in_features=6, out_features=4), True),
    "both widths, other names": (weight(6, 4, bias=6, input_size=6, output_size=4), True),
    "short names": (weight(6, 4, bias=6, in_dim=6, out_dim=4), True),
    "both widths, as they lie": (weight(6, 4, in_dim=4, out_dim=6), False),
    "outputs of a Conv1D": (weight(6, 4, nf=4), True),
    "outputs of a Conv1D, as they lie": (weight(6, 4, nf=6), False),
}


@pytest.mark.parametrize("case", TRANSPOSED)
def test_which_side_has_the_outputs(case):
    module, transposed = TRANSPOSED[case]
    assert row_of(module, "weight").matrix.endswith(", stored transposed") == transposed


def test_stacked_matrices_by_the_width_that_their_module_states():
    """Zamba's ``x_proj_weight`` reads that width, and is no expert's matrix: it is taken as it lies."""
    mixer = said(
        Bag(x_proj_weight=gaussian(2, 6, 10), down_proj=gaussian(2, 6, 10)), hidden_size=10
    )
    assert row_of(mixer, "x_proj_weight").matrix == "2·(6×10)"
    assert row_of(mixer, "down_proj").matrix == "2·(10×6), stored transposed"


def test_a_layout_of_the_users_own():
    layer = Bag(mix=gaussian(4, 12))
    row = row_of(layer, "mix", layouts={"*.mix": "transposed"}, splits={"*.mix": 3})
    assert row.matrix == "3·(4×4), stored transposed"
    with pytest.raises(ValueError, match=r"layouts\['\*.mix'\]='columns': expected one of auto"):
        row_of(layer, "mix", layouts={"*.mix": "columns"})
    with pytest.raises(ValueError, match=r"layouts\['\*.mux'\] matches no parameter"):
        row_of(layer, "mix", layouts={"*.mux": "stack"})


def test_a_layout_of_the_users_keeps_the_name_of_what_it_lays_out():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Conv2d(4, 6, 3), nn.Linear(6, 2))
    before = muon_for(model).routes
    after = muon_for(model, layouts={"0.in_proj_weight": "auto", "1.weight": "conv"}).routes
    for name, layout in (("0.in_proj_weight", "auto"), ("1.weight", "conv")):
        assert after[name].why == f"{before[name].why}, {layout} by layouts['{name}']"


@pytest.mark.parametrize("argument", [{"layouts": {"*.proj": "stack"}}, {"splits": {"*.proj": 2}}])
def test_a_pattern_that_matches_nothing_is_told_the_names_of_matrices(argument):
    """The remedy names no bias, though the name of one may be nearer."""
    with pytest.raises(ValueError, match="matches no parameter of two dim") as refused:
        row_of(Bag(proj=nn.Linear(WIDTH, WIDTH)), "proj.weight", **argument)
    assert "proj.weight" in str(refused.value)
    assert "bias" not in str(refused.value)


# --- fused: the layer, the weight, its matrices, and the sizes and number of parts that come in turn


def with_norm(outputs: int) -> nn.Module:
    return Bag(conv=nn.Conv2d(WIDTH, outputs, 1), norm=nn.BatchNorm2d(outputs))


def selective(outputs: int) -> nn.Module:
    """The layers of Mamba's mixer around its state: Δ, B and C come from one projection."""
    return Bag(x_proj=linear(outputs, 32), dt_proj=linear(32, 4), A_log=torch.zeros(32, 6))


def torchtitan() -> nn.Module:
    """Two query heads, a key and a value for each of three groups."""
    fused = said(Bag(wqkv=linear(48)), heads_per_kv=2, r_dim=4, head_dim=4)
    return Bag(qkv_linear=fused, wo=linear(WIDTH, 24))


HEADS = {"num_heads": 4}
CONFIG = SimpleNamespace(num_attention_heads=6, num_kv_heads=2, head_dim=4)
LATENT = {"n_heads": 3, "qk_nope_head_dim": 4, "v_head_dim": 6}
FUSED = {
    "two key heads": (lambda: Attention(qkv_proj=linear(32)), "16×16 + 8×16 + 8×16", None),
    "one key head": (lambda: Attention(qkv_proj=linear(24)), "16×16 + 4×16 + 4×16", None),
    "capital letter": (lambda: Attention(Wqkv=linear(48)), "3·(16×16)", None),
    "cross-attention": (lambda: Attention(c_attn=linear(32), q_attn=linear(16)), "2·(16×16)", None),
    "k and v": (lambda: Attention(24, kv=linear(48)), "2·(24×16)", None),
    "q and k": (lambda: Attention(qk=linear(32)), "2·(16×16)", None),
    "two parts of an input": (lambda: Attention(32, in_proj=linear(64)), "2·(32×16)", None),
    "an input that is one": (lambda: Attention(64, in_proj=linear(64)), "64×16", None),
    "parts that timm states":
        (lambda: Attention(in_proj=linear(88), in_split=[40, 16, 16, 16]),
         "40×16 + 16×16 + 16×16 + 16×16", None),
    "gate and up": (lambda: Attention(20, gate_up_proj=linear(40)), "2·(20×16)", None),
    "a first layer without a gate, as T5's":
        (lambda: Bag(wi=linear(40), wo=linear(WIDTH, 40)), "40×16", None),
    "a gate of the same name, as ModernBERT's":
        (lambda: Bag(Wi=linear(40), Wo=linear(WIDTH, 20)), "2·(20×16)", None),
    "a single query": (lambda: Attention(qkv=linear(33)), "1×16 + 16×16 + 16×16", None),
    "another name": (lambda: Attention(att_proj=linear(48)), "3·(16×16)", None),
    "nothing reads them": (lambda: Bag(qkv=linear(48)), "3·(16×16)", None),
    "nothing reads them, numbers in the configuration":
        (lambda: said(Bag(qkv=linear(40)), config=CONFIG), "24×16 + 8×16 + 8×16", None),
    "convolutions":
        (lambda: Bag(qkv=nn.Conv2d(WIDTH, 48, 1), proj=nn.Conv2d(WIDTH, 16, 1)), "3·(16×16)", None),
    "wide convolutions":
        (lambda: Bag(qkv=nn.Conv1d(WIDTH, 48, 3), proj=nn.Conv1d(WIDTH, 16, 1)), "3·(16×48)", None),
    "a convolution and its norm":
        (lambda: Bag(qkv=with_norm(48), proj=with_norm(WIDTH)), "3·(16×16)", None),
    "a module of two layers":
        (lambda: Bag(qkv=Bag(first=linear(48), second=linear(48, 48))), "48×16", None),
    "heads that do not come first":
        (lambda: Attention(qkv=linear(48), **HEADS, dim_head=4, head_first=False), "3·(16×16)", None),
    "Mamba's state": (lambda: selective(16), "4×32 + 6×32 + 6×32", None),
    "Mamba's state, of another size": (lambda: selective(15), "15×32", None),
    "GPT-NeoX":
        (lambda: GPTNeoXAttention(query_key_value=linear(48), **HEADS), "3·(16×16)", ((4, 4, 4), 4)),
    "LeViT":
        (lambda: Attention(32, qkv=linear(64), **HEADS, key_dim=4, val_dim=8),
         "16×16 + 16×16 + 32×16", ((4, 4, 8), 4)),
    "EfficientFormer":
        (lambda: Attention(32, queries_keys_values=linear(64), num_attention_heads=4, key_dim=4,
                           attention_ratio=2), "16×16 + 16×16 + 32×16", ((4, 4, 8), 4)),
    "LeViT's k and v":
        (lambda: Attention(32, kv=linear(48), **HEADS, key_dim=4, val_dim=8),
         "16×16 + 32×16", ((4, 8), 4)),
    "CoAtNet":
        (lambda: Attention(qkv=linear(48), **HEADS, dim_head=4, head_first=True),
         "3·(16×16)", ((4, 4, 4), 4)),
    "DeBERTa":
        (lambda: DisentangledSelfAttention(in_proj=linear(48), num_attention_heads=4),
         "3·(16×16)", ((4, 4, 4), 4)),
    "torchtitan": (torchtitan, "24×16 + 12×16 + 12×16", ((8, 4, 4), 3)),
    "latent": (lambda: Attention(18, kv_b_proj=linear(30), **LATENT), "12×16 + 18×16", ((4, 6), 3)),
    "latent, another name":
        (lambda: Attention(18, wkv_b=linear(30), **LATENT), "12×16 + 18×16", ((4, 6), 3)),
}  # fmt: skip
# Fused by their names, and no shape says how: they are not cut, and the table says so.
UNKNOWN = {
    "no parts that add up": lambda: Attention(qkv_proj=linear(26)),
    "in which order?": lambda: Attention(query_key_value=linear(48)),
    "wider than three inputs": lambda: Bag(qkv=linear(64)),
    "a convolution": lambda: Bag(qkv=nn.Conv2d(WIDTH, 50, 1), proj=nn.Conv2d(WIDTH, WIDTH, 1)),
}


@pytest.mark.parametrize("case", FUSED)
def test_shapes_decide_how_a_fused_weight_is_cut(case):
    build, matrix, in_turn = FUSED[case]
    optimizer = muon_for(in_a_model(build()))
    row = optimizer.routes[0]
    assert row.matrix == matrix
    assert "splits={…}" not in row.why
    group = optimizer.param_groups[row.group]
    if in_turn is None:
        assert group["split_repeats"] == 1
    else:
        assert (group["split_sizes"], group["split_repeats"]) == in_turn
        assert row.why.endswith("head by head")


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_weight_that_is_fused_by_its_name_alone_is_told(case):
    row = muon_for(in_a_model(UNKNOWN[case]())).routes[0]
    assert "·" not in row.matrix
    assert row.why.endswith("is fused by its name, and not cut: give splits={…}")


def test_heads_are_cut_along_rows_and_columns_by_hand():
    layer, splits = Bag(q=linear(16), o=linear(16)), {"*.q.weight": 4, "*.o.weight": {"columns": 4}}
    assert row_of(layer, "q.weight", splits=splits).matrix == "4·(4×16)"
    assert row_of(layer, "o.weight", splits=splits).matrix == "4·(16×4)"
    whole = muon_for(SmallGPT("untied"), splits={"*.qkv.weight": 1}).routes
    assert whole["blocks.0.qkv.weight"].matrix == "48×16"


def test_splits_may_match_others_beside_muons():
    """A broad pattern, and a weight that is frozen for now, are no misunderstanding."""
    model = mlp(8, 8, 8, 8)
    model[2].weight.requires_grad_(False)
    routes = muon_for(model, splits={"[04].weight": 2, "2.weight": 4}).routes
    assert (routes["0.weight"].matrix, routes["4.weight"].matrix) == ("2·(4×8)", "8×8")


def grouped() -> nn.Module:
    return Attention(24, qkv_proj=linear(48))


def by_head() -> nn.Module:
    return GPTNeoXAttention(qkv_proj=linear(48), **HEADS)


def transposed() -> nn.Module:
    return Attention(qkv_proj=Conv1D(48, WIDTH))


@pytest.mark.parametrize(
    ("layer", "parts", "error", "message"),
    [
        (grouped, 3, ValueError, "parts of 24, 12, 12 rows, as the layers around"),
        (grouped, 5, ValueError, "has 48 rows, which 5 does not divide"),
        (grouped, True, TypeError, "=True: expected the number of equal parts, or the"),
        (grouped, "3", TypeError, "number of equal parts, or the rows of each"),
        (grouped, (24, 12), ValueError, "sum to 36, but the weight has 48 rows"),
        (grouped, {"columns": 3}, ValueError,
         r"\[\"columns\"\]=3: .* 16 columns, which 3 does not divide; .* as \(8, 8\)"),
        (grouped, {"colums": 4}, ValueError, 'expected "rows", "columns" or "repeats"'),
        (grouped, {"repeats": 5}, ValueError, "repeats=5.*48 outputs"),
        (transposed, 5, ValueError,
         r"has 48 outputs, which 5 does not divide; give the outputs of each part, as \(24, 24\)"),
        (by_head, {"repeats": 4}, ValueError, "repeats=4 and \"rows\": None: expected"),
        (by_head, 3, ValueError, "3 parts in turn, 4 times.*\"repeats\": 4"),
    ],
)  # fmt: skip
def test_cuts_that_cannot_be_right_are_refused(layer, parts, error, message):
    with pytest.raises(error, match=message):
        muon_for(in_a_model(layer()), splits={"*qkv_proj.weight": parts})
