"""Which role a parameter has and which matrices it is, read off real torch modules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.routing.sample_models import (
    VOCABULARY,
    WIDTH,
    Bag,
    Block,
    SmallGPT,
    mlp,
    roles,
    with_role,
)
from torch import nn
from torch.nn.utils import parametrizations

from polarstep import AdamW, muon_for
from polarstep.routing.routes import Route

# --- which role


def test_mlp_last_layer_is_the_head():
    optimizer = muon_for(mlp(8, 16, 16, 3))
    assert with_role(optimizer, "hidden") == {"0.weight", "2.weight"}
    assert with_role(optimizer, "head") == {"4.weight"}
    assert with_role(optimizer, "vector") == {"0.bias", "2.bias", "4.bias"}


def test_an_autoencoder_ends_in_a_head_although_its_width_is_read():
    assert with_role(muon_for(mlp(32, 4, 32)), "head") == {"2.weight"}


def bare(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def test_weights_and_biases_of_every_head_and_expert_as_bare_parameters():
    """b1 of w1 may be stacked as w1 is; its length says which side of w1 has the outputs."""
    attention = Bag(W_Q=bare(4, 16, 8), b_Q=bare(4, 8), W_O=bare(4, 8, 16), b_O=bare(16))
    mlp_of = Bag(W_in=bare(16, 64), b_in=bare(64), W_out=bare(64, 16), b_out=bare(16))
    experts = Bag(w1=bare(4, 64, 16), b1=bare(4, 64), w2=bare(4, 16, 64), b2=bare(4, 16))
    model = Bag(emb=nn.Embedding(50, 16), attn=attention, mlp=mlp_of, experts=experts)
    optimizer = muon_for(model)
    biases = {f"attn.b_{x}" for x in "QO"} | {"mlp.b_in", "mlp.b_out", "experts.b1", "experts.b2"}
    assert with_role(optimizer, "vector") == biases
    read = {row.name: (row.matrix, row.factors) for row in optimizer.routes if row.role == "hidden"}
    assert read["attn.W_Q"] == ("4·(8×16), stored transposed", (pytest.approx(0.5**0.5),))
    assert read["mlp.W_in"] == ("64×16, stored transposed", (2.0,))
    assert read["mlp.W_out"] == ("16×64, stored transposed", (0.5,))
    assert read["experts.w1"] == ("4·(64×16)", (2.0,))
    assert read["experts.w2"] == ("4·(16×64)", (0.5,))
    why = optimizer.routes["experts.b1"].why
    assert why == "vector: bare parameter, the bias of w1 by its name and shape"


def test_bare_matrices_called_b_beside_others_are_matrices():
    model = Bag(w1=bare(4, 8, 16), b1=bare(4, 24), wb=bare(8, 16), b=bare(8, 16))
    assert with_role(muon_for(model), "hidden") == {"w1", "b1", "wb", "b"}


@pytest.mark.parametrize("name", ["lm_head", "out", "logits"])
@pytest.mark.parametrize("shape", [(50, 16), (16, 50)], ids=str)
def test_a_bare_head_is_as_long_as_an_embedding(name, shape):
    model = Bag(emb=nn.Embedding(50, 16), trunk=nn.Linear(16, 16), **{name: bare(*shape)})
    assert with_role(muon_for(model), "head") == {name}


def test_an_unembedding_is_a_head_where_the_embedding_is_bare_too():
    class Unembed(Bag):
        pass

    trunk = Bag(W_in=bare(16, 64), W_out=bare(64, 16))
    model = Bag(trunk=trunk, last=Unembed(W_U=bare(16, 50), b_U=bare(50)))
    assert with_role(muon_for(model), "head") == {"last.W_U"}


def test_bare_matrices_that_only_look_like_heads_are_hidden():
    in_blocks = nn.ModuleList(Bag(out=bare(16, 50), up=nn.Linear(16, 16)) for _ in range(2))
    model = Bag(emb=nn.Embedding(50, 16), blocks=in_blocks, out=bare(16, 20))
    assert with_role(muon_for(model), "head") == set()
    reads = Bag(emb=nn.Embedding(50, 16), out=bare(16, 50), trunk=nn.Linear(50, 50))
    assert "out" not in with_role(muon_for(reads), "head")


def test_a_head_with_one_output_is_a_head_and_a_hidden_one_a_vector():
    optimizer = muon_for(Bag(gate=nn.Linear(8, 1), trunk=nn.Linear(8, 8), value=nn.Linear(8, 1)))
    assert roles(optimizer)["value.weight"] == "head"
    assert roles(optimizer)["gate.weight"] == "vector"


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, WIDTH])
def test_untied_gpt(layers, vocabulary):
    optimizer = muon_for(SmallGPT("untied", layers, vocabulary))
    assert with_role(optimizer, "embedding") == {"wte.weight", "wpe.weight"}
    assert with_role(optimizer, "head") == {"head.weight"}
    assert len(with_role(optimizer, "hidden")) == 3 * layers


@pytest.mark.parametrize("layers", [1, 2])
def test_tied_head_is_the_embedding_and_appears_once(layers):
    optimizer = muon_for(SmallGPT("tied", layers))
    assert with_role(optimizer, "embedding") == {"wte.weight", "wpe.weight"}
    assert with_role(optimizer, "head") == set()
    assert optimizer.routes["wte.weight"].why.startswith(
        "embedding: Embedding, tied to head.weight"
    )


def test_tied_head_registered_first():
    model = Bag(
        head=nn.Linear(WIDTH, VOCABULARY, bias=False),
        wte=nn.Embedding(VOCABULARY, WIDTH),
        block=Block(),
    )
    model.wte.weight = model.head.weight
    assert muon_for(model).routes["head.weight"].why == "embedding: Embedding, tied to wte.weight"


@pytest.mark.parametrize("layers", [1, 2, 12])
def test_functionally_tied_gpt_has_no_head(layers):
    optimizer = muon_for(SmallGPT("functional", layers))
    assert with_role(optimizer, "head") == set()
    assert roles(optimizer)[f"blocks.{layers - 1}.down.weight"] == "hidden"


def test_functional_tying_without_a_list_of_blocks():
    optimizer = muon_for(Bag(wte=nn.Embedding(VOCABULARY, WIDTH), block=Block()))
    assert with_role(optimizer, "head") == set()


def test_a_last_layer_as_wide_as_the_embedding_is_a_head_if_it_is_called_so():
    """ImageGPT's embedding has an entry more than its head, and its head is square."""
    parts = {"wte": nn.Embedding(WIDTH + 1, WIDTH), "blocks": nn.ModuleList([Block(), Block()])}
    head = nn.Linear(WIDTH, WIDTH, bias=False)
    assert with_role(muon_for(Bag(**parts, lm_head=head)), "head") == {"lm_head.weight"}
    assert with_role(muon_for(Bag(**parts, mix=head)), "head") == set()


def test_a_position_table_as_long_as_the_model_is_wide_makes_no_heads():
    optimizer = muon_for(SmallGPT("untied", context=WIDTH))
    assert with_role(optimizer, "head") == {"head.weight"}
    optimizer = muon_for(SmallGPT("untied", context=3 * WIDTH))  # as wide as a fused projection
    assert with_role(optimizer, "head") == {"head.weight"}


def test_head_registered_before_the_trunk():
    lm_first = Bag(
        head=nn.Linear(WIDTH, VOCABULARY),
        wte=nn.Embedding(VOCABULARY, WIDTH),
        blocks=nn.ModuleList([Block(), Block()]),
    )
    assert with_role(muon_for(lm_first), "head") == {"head.weight"}
    classifier = Bag(head=nn.Linear(WIDTH, 10), blocks=nn.ModuleList([Block(), Block()]))
    assert with_role(muon_for(classifier), "head") == {"head.weight"}


def test_several_language_heads_in_a_list():
    heads = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, VOCABULARY))
        for _ in range(3)
    )
    model = Bag(wte=nn.Embedding(VOCABULARY, WIDTH), block=Block(), heads=heads)
    optimizer = muon_for(model)
    assert with_role(optimizer, "head") == {f"heads.{i}.2.weight" for i in range(3)}


@pytest.mark.parametrize(
    "heads",
    [
        {"policy": nn.Linear(16, 4), "value": nn.Linear(16, 1)},
        {"heads": nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 1)])},
        {"heads": nn.ModuleDict({"policy": mlp(16, 16, 4), "value": mlp(16, 16, 1)})},
        {"policy": mlp(16, 16, 4), "value": mlp(16, 16, 1)},
    ],
    ids=["linear", "list", "dict of networks", "networks"],
)
def test_policy_and_value_are_both_heads(heads):
    optimizer = muon_for(Bag(trunk=mlp(8, 16, 16), **heads))
    assert {optimizer.routes[name].shape[0] for name in with_role(optimizer, "head")} == {4, 1}


def test_plain_attributes_make_one_head():
    model = Bag(fc1=nn.Linear(20, 16), fc2=nn.Linear(16, 12), fc3=nn.Linear(12, 10))
    assert with_role(muon_for(model), "head") == {"fc3.weight"}


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("part", ["backbone", "layer", "fc"])
def test_a_second_name_for_a_part_of_the_model_makes_no_head(part, first):
    """As with ``self.backbone = self.net[:-1]``, registered before or after the whole network."""
    if part == "fc":
        net = Bag(one=nn.Linear(8, 16), two=nn.Linear(16, 16), fc=nn.Linear(16, 3))
        parts = {"net": net, part: net.fc}
    else:
        net = mlp(8, 16, 16, 3)
        parts = {"net": net, part: net[:-1] if part == "backbone" else net[0]}
    optimizer = muon_for(Bag(**dict(reversed(parts.items())) if first else parts))
    assert [optimizer.routes[name].shape for name in with_role(optimizer, "head")] == [(3, 16)]


def test_a_head_that_predicts_what_the_model_reads_is_known_by_its_name():
    """A decision transformer reads states and actions, and predicts them."""
    parts = {
        "embed_state": nn.Linear(5, WIDTH),
        "embed_action": nn.Linear(3, WIDTH),
        "blocks": nn.ModuleList([Block(), Block()]),
    }
    heads = {"state": nn.Linear(WIDTH, 5), "action": mlp(WIDTH, 3), "value": nn.Linear(WIDTH, 1)}
    named = {f"predict_{name}": head for name, head in heads.items()}
    found = with_role(muon_for(Bag(**parts, **named)), "head")
    assert found == {
        "predict_state.weight",
        "predict_action.0.weight",
        "predict_value.weight",
    }
    assert len(with_role(muon_for(Bag(**parts, **heads)), "head")) == 1


def test_language_heads_as_wide_as_a_hidden_layer():
    """Musicgen's heads have an entry less than its embeddings, and the width of its encoder's MLP."""
    model = Bag(
        encoder=nn.ModuleList([Block(), Block()]),  # reads widths 16 and 64
        decoder=Bag(
            wte=nn.Embedding(4 * WIDTH + 1, WIDTH),
            blocks=nn.ModuleList([Block(), Block()]),
            lm_heads=nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2)),
        ),
        join=nn.Linear(WIDTH, WIDTH),
    )
    found = with_role(muon_for(model), "head")
    assert found == {"decoder.lm_heads.0.weight", "decoder.lm_heads.1.weight"}


def test_a_head_at_any_place_is_known_by_its_name_and_by_outputs_that_no_layer_reads():
    def model(**last: nn.Module) -> nn.Module:
        decoder = Bag(**last, bottleneck=nn.Conv2d(12, WIDTH, 3))  # the last layer is not the head
        return Bag(backbone=mlp(8, 12, 12), decode_head=decoder, auxiliary=nn.Linear(12, 7))

    optimizer = muon_for(model(classifier=nn.Conv2d(WIDTH, 7, 1)))
    assert with_role(optimizer, "head") == {"decode_head.classifier.weight", "auxiliary.weight"}
    assert optimizer.routes["decode_head.classifier.weight"].why == (
        "head: no layer reads its 7 outputs, and its name says head"
    )
    read = model(classifier=nn.Conv2d(WIDTH, 12, 1))  # as wide as what the last layer reads
    assert with_role(muon_for(read), "head") == {"auxiliary.weight"}
    assert with_role(muon_for(model(other=nn.Conv2d(WIDTH, 7, 1))), "head") == {"auxiliary.weight"}


def test_a_layer_called_head_in_a_repeated_block_is_hidden():
    blocks = nn.ModuleList(
        Bag(q_head=nn.Linear(WIDTH, 12), up=nn.Linear(WIDTH, WIDTH)) for _ in range(2)
    )
    optimizer = muon_for(Bag(blocks=blocks, out=nn.Linear(WIDTH, 3)))
    assert with_role(optimizer, "head") == {"out.weight"}


def test_stacked_output_layers_are_heads():
    stack = Bag(weight=torch.randn(3, WIDTH, 21))  # one for each codebook, inputs × outputs
    decoder = Bag(blocks=nn.ModuleList([Block(), Block()]), codebooks_head=stack)
    optimizer = muon_for(Bag(decoder=decoder, codec=mlp(8, 12, 8)))
    assert with_role(optimizer, "head") == {"decoder.codebooks_head.weight", "codec.2.weight"}


def test_the_classes_of_a_loss_are_a_head():
    """The loss is a module of its own, and holds another loss without parameters."""
    loss = Bag(weight=torch.randn(3, 12), loss=nn.CrossEntropyLoss())
    optimizer = muon_for(Bag(trunk=mlp(8, 16, 12), objective=loss))
    assert with_role(optimizer, "head") == {"objective.weight"}


def test_flattened_convolution_before_the_head_stays_hidden():
    model = Bag(conv1=nn.Conv2d(1, 4, 3), conv2=nn.Conv2d(4, 8, 3), fc=nn.Linear(8 * 9, 10))
    optimizer = muon_for(model)
    assert with_role(optimizer, "head") == {"fc.weight"}
    assert with_role(optimizer, "hidden") == {"conv1.weight", "conv2.weight"}


def test_experts_in_a_dict_stay_hidden():
    experts = nn.ModuleDict({f"e{i}": mlp(WIDTH, 4 * WIDTH, WIDTH) for i in range(4)})
    optimizer = muon_for(Bag(router=nn.Linear(WIDTH, 4), experts=experts))
    assert len(with_role(optimizer, "hidden") - {"router.weight"}) == 8
    assert "experts.e{0…3}.0.weight ×4" in str(optimizer.routes)


def experts(count=4):
    return nn.ModuleList([mlp(WIDTH, 4 * WIDTH, WIDTH) for _ in range(count)])


@pytest.mark.parametrize("name", ["router", "gate"])
def test_a_layer_with_a_row_for_each_expert_is_a_router_by_its_name(name):
    model = Bag(moe=Bag(**{name: nn.Linear(WIDTH, 4, bias=False)}, experts=experts()))
    optimizer = muon_for(model)
    assert with_role(optimizer, "router") == {f"moe.{name}.weight"}
    why = optimizer.routes[f"moe.{name}.weight"].why
    assert why == f"router: a row for each of 4 experts, ‘{name}’ in its name"


def test_other_names_and_other_sizes_are_no_routers():
    other = Bag(moe=Bag(choice=nn.Linear(WIDTH, 4, bias=False), experts=experts()))
    assert with_role(muon_for(other), "router") == set()
    more = Bag(moe=Bag(gate=nn.Linear(WIDTH, 5, bias=False), experts=experts()))
    assert with_role(muon_for(more), "router") == set()


def test_a_router_without_experts_in_sight_has_fewer_rows_than_columns():
    few = Bag(block=Bag(router=nn.Linear(WIDTH, 5, bias=False), mlp=mlp(WIDTH, 32, WIDTH)))
    optimizer = muon_for(few)
    assert with_role(optimizer, "router") == {"block.router.weight"}
    assert optimizer.routes["block.router.weight"].why == "router: ‘router’ in its name"
    many = Bag(block=Bag(router=nn.Linear(WIDTH, 2 * WIDTH), mlp=mlp(2 * WIDTH, 32, WIDTH)))
    assert with_role(muon_for(many), "router") == set()


def test_a_router_with_rows_for_shared_experts_too():
    class TopkRouter(Bag):
        pass

    gate = TopkRouter(weight=torch.randn(6, WIDTH))  # four experts and two that are shared
    model = Bag(blocks=nn.ModuleList([Bag(gate=gate, experts=experts())]))
    assert with_role(muon_for(model), "router") == {"blocks.0.gate.weight"}


@pytest.mark.parametrize("name", ["experts", "compress"])
def test_the_number_of_experts_in_the_configuration_counts_beside_experts(name):
    """DeepSeek-V4's indexer has a gate with as many rows, and no experts near it."""
    layer = Bag(gate=nn.Linear(WIDTH, 5), **{name: nn.Linear(WIDTH, WIDTH)})
    layer.config = SimpleNamespace(n_routed_experts=5)
    model = Bag(blocks=nn.ModuleList([layer]), out=nn.Linear(WIDTH, 3))
    assert roles(muon_for(model))["blocks.0.gate.weight"] == (
        "router" if name == "experts" else "hidden"
    )


def test_sequential_of_blocks_and_of_layers():
    blocks = nn.Sequential(Block(), Block())
    assert with_role(muon_for(blocks), "head") == set()
    blocks = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 10))
    assert with_role(muon_for(blocks), "head") == {"2.weight"}
    layers = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in mlp(8, 16, 12, 3)[::2]))
    assert with_role(muon_for(layers), "head") == {"2.0.weight"}


def test_the_head_of_a_diffusion_transformer_comes_before_its_modulation():
    """DiT registers the layer that makes shift and scale of the last norm after the output layer."""

    def modulation(parts: int) -> nn.Module:
        return nn.Sequential(nn.SiLU(), nn.Linear(16, parts * 16))

    blocks = nn.ModuleList(
        Bag(mlp=nn.Linear(16, 16), adaLN_modulation=modulation(6)) for _ in range(2)
    )
    final = Bag(linear=nn.Linear(16, 12), adaLN_modulation=modulation(2))
    found = roles(muon_for(Bag(x=nn.Linear(12, 16), blocks=blocks, final_layer=final)))
    assert found["final_layer.linear.weight"] == "head"
    assert found["final_layer.adaLN_modulation.1.weight"] == "hidden"
    assert found["blocks.0.adaLN_modulation.1.weight"] == "hidden"


def test_adaptive_softmax_is_a_head():
    model = Bag(trunk=mlp(8, 16, 16), out=nn.AdaptiveLogSoftmaxWithLoss(16, 40, [10, 20]))
    optimizer = muon_for(model)
    assert with_role(optimizer, "hidden") == {"trunk.0.weight", "trunk.2.weight"}
    assert len(with_role(optimizer, "head")) == 5


# --- which matrices


def test_convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(8, 12, 3, groups=4),
        nn.Conv2d(12, 12, 3, groups=12),
        nn.ConvTranspose2d(12, 6, 2, groups=2),
        nn.Conv3d(6, 5, 2),
        nn.Flatten(),
        nn.Linear(5, 2),
    )
    optimizer = muon_for(model)
    views = {row.name: row.matrix for row in optimizer.routes if row.algorithm == "Muon"}
    assert views == {
        "0.weight": "8×27",
        "1.weight": "4·(3×18)",
        "3.weight": "2·(6×12)",
        "4.weight": "5×48",
    }
    assert optimizer.routes["2.weight"].why == "vector: depthwise filters of a Conv2d"


def test_one_dimensional_convolution_is_no_stack():
    optimizer = muon_for(nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 2, 3)))
    assert optimizer.routes["0.weight"].matrix == "8×12"
    assert with_role(optimizer, "head") == {"2.weight"}


def test_a_rule_that_sends_a_convolutional_head_to_muon_keeps_its_form():
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Conv1d(8, 4, 3, groups=2))
    optimizer = muon_for(model, rules=[("1.*", "muon")])
    assert optimizer.routes["1.weight"].matrix == "2·(2×12)"
    assert optimizer.routes["1.weight"].role == "head"


def test_transformer_encoder():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 32), 2, enable_nested_tensor=False
    )
    optimizer = muon_for(encoder)
    assert optimizer.routes["layers.0.self_attn.in_proj_weight"].matrix == "3·(16×16)"
    assert optimizer.routes["layers.1.self_attn.out_proj.weight"].role == "hidden"
    assert with_role(optimizer, "head") == set()
    assert with_role(muon_for(nn.MultiheadAttention(8, 2)), "hidden") == {
        "in_proj_weight",
        "out_proj.weight",
    }


@pytest.mark.parametrize(
    ("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.LSTMCell, 4), (nn.GRUCell, 3)]
)
def test_recurrent_gates_are_matrices_of_their_own(kind, gates):
    optimizer = muon_for(Bag(rnn=kind(6, 8), out=nn.Linear(8, 3)))
    ih = "rnn.weight_ih" if issubclass(kind, nn.RNNCellBase) else "rnn.weight_ih_l0"
    assert optimizer.routes[ih].matrix == f"{gates}·(8×6)"
    assert with_role(optimizer, "head") == {"out.weight"}


def test_plain_recurrence_and_projected_lstm():
    optimizer = muon_for(Bag(rnn=nn.RNN(6, 8), lstm=nn.LSTM(6, 8, proj_size=5)))
    assert optimizer.routes["rnn.weight_hh_l0"].matrix == "8×8"
    assert optimizer.routes["lstm.weight_hh_l0"].matrix == "4·(8×5)"
    assert optimizer.routes["lstm.weight_hr_l0"].matrix == "5×8"


def test_bilinear_is_a_stack():
    optimizer = muon_for(Bag(pair=nn.Bilinear(4, 6, 8), out=nn.Linear(8, 2)))
    assert optimizer.routes["pair.weight"].matrix == "8·(4×6)"


def test_vision_transformer_with_bare_parameters():
    model = Bag(
        cls_token=torch.zeros(1, 1, WIDTH),
        pos_embed=torch.zeros(1, 5, WIDTH),
        gate=torch.zeros(1, 5, WIDTH),
        column=torch.zeros(WIDTH, 1),
        mixing=torch.randn(WIDTH, WIDTH),
        patch=nn.Conv2d(3, WIDTH, 4, 4),
        blocks=nn.ModuleList([Block(), Block()]),
        head=nn.Linear(WIDTH, 10),
    )
    optimizer = muon_for(model)
    found = roles(optimizer)
    assert found["pos_embed"] == found["cls_token"] == "embedding"
    assert found["gate"] == found["column"] == "vector"
    assert found["mixing"] == found["patch.weight"] == "hidden"
    assert optimizer.routes["pos_embed"].why == "embedding: bare parameter, ‘pos’ in its name"
    assert "leading dimension 1" in optimizer.routes["gate"].why


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("object_queries", "embedding"),
        ("codebook", "embedding"),
        ("sa_lambdas", "vector"),
        ("alpha", "vector"),
        ("head_scales", "vector"),
        ("query", "hidden"),
    ],
)
def test_tables_and_tables_of_scalars_are_known_by_their_names(name, role):
    model = Bag(**{name: torch.ones(6, 4)}, net=mlp(8, 8, 8, 2))
    assert roles(muon_for(model))[name] == role


def test_queries_without_keys_beside_them_are_a_table():
    def role(**beside: nn.Module | torch.Tensor) -> str:
        projector = Bag(latent_query=torch.ones(6, 8), **beside)
        return roles(muon_for(Bag(projector=projector, net=mlp(9, 9, 2))))["projector.latent_query"]

    assert role(attention=Bag(q=nn.Linear(8, 8), k=nn.Linear(8, 8))) == "embedding"
    assert role(key=torch.ones(6, 8), out=nn.Linear(8, 8)) == "hidden"  # two maps
    assert role(out=nn.Linear(7, 8)) == "hidden"  # no layer reads the width of the queries


def test_state_space_layers_with_several_heads():
    """Zamba has a row of A_log and of D for each head."""
    mixer = Bag(A_log=torch.zeros(2, 12, 4), D=torch.ones(2, 12), mix=torch.ones(12, 12))
    optimizer = muon_for(Bag(layers=nn.ModuleList([mixer]), out=nn.Linear(12, 3)))
    assert with_role(optimizer, "hidden") == {"layers.0.mix"}
    plain = muon_for(Bag(layers=nn.ModuleList([Bag(D=torch.ones(8, 12))]), out=nn.Linear(12, 3)))
    assert with_role(plain, "hidden") == {"layers.0.D"}


@pytest.mark.parametrize(("columns", "role"), [(8 * 6 * 9, "vector"), (100, "hidden")])
def test_filters_made_flat_are_no_matrix(columns, role):
    """A CondConv mixes several filters, each a row of its weight."""
    conv = Bag(weight=torch.randn(4, columns))
    conv.in_channels, conv.out_channels, conv.kernel_size, conv.groups = 8, 6, (3, 3), 1
    model = Bag(blocks=nn.ModuleList([Bag(conv=conv)]), net=mlp(9, 9, 2))
    assert roles(muon_for(model))["blocks.0.conv.weight"] == role


def test_a_parameter_with_heads_inside_is_one_matrix():
    """XLNet's projections are (width, heads, width of a head)."""
    attention = Bag(q=torch.randn(12, 3, 4), seg_embed=torch.zeros(2, 3, 4))
    attention.n_head, attention.d_head = 3, 4
    model = Bag(layers=nn.ModuleList([Bag(attention=attention)]), out=nn.Linear(12, 5))
    routes = muon_for(model).routes
    assert routes["layers.0.attention.q"].matrix == "12×12"
    assert "3 heads side by side" in routes["layers.0.attention.q"].why
    assert routes["layers.0.attention.seg_embed"].role == "embedding"
    attention.n_head = 4
    assert muon_for(model).routes["layers.0.attention.q"].matrix == "12·(3×4)"


def test_names_are_no_evidence_where_there_is_a_type():
    model = nn.Sequential()
    for name, layer in (("pos_embedding", nn.Linear(8, 8)), ("bias", nn.Linear(8, 3))):
        model.add_module(name, layer)
    optimizer = muon_for(model)
    assert roles(optimizer)["pos_embedding.weight"] == "hidden"
    assert roles(optimizer)["bias.weight"] == "head"


def test_stacked_experts_and_their_biases():
    model = Bag(
        router=nn.Linear(WIDTH, 4, bias=False),
        moe=Bag(w1=torch.randn(4, WIDTH, 32), up_bias=torch.zeros(4, 32)),
        head=nn.Linear(WIDTH, 10),
    )
    optimizer = muon_for(model)
    assert optimizer.routes["moe.w1"].matrix == "4·(16×32)"
    assert roles(optimizer)["moe.up_bias"] == "vector"
    assert len([g for g in optimizer.param_groups if g["algorithm"] == "muon"]) == 1


def test_lists_of_parameters_are_known_by_the_name_of_the_list():
    lists = Bag(
        weights=nn.ParameterList([torch.randn(4, 4), torch.randn(4, 4)]),
        biases=nn.ParameterList([torch.zeros(3, 4)]),
    )
    optimizer = muon_for(lists)
    assert with_role(optimizer, "hidden") == {"weights.0", "weights.1"}
    assert with_role(optimizer, "vector") == {"biases.0"}


def test_norms_of_several_dimensions_are_vectors():
    optimizer = muon_for(nn.Sequential(nn.LayerNorm([4, 6]), *mlp(6, 6, 2)))
    assert with_role(optimizer, "vector") >= {"0.weight", "0.bias"}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_weight_norm(old):
    norm = nn.utils.weight_norm if old else parametrizations.weight_norm
    optimizer = muon_for(nn.Sequential(norm(nn.Linear(8, 6)), nn.ReLU(), norm(nn.Linear(6, 3))))
    gain, direction = ("weight_g", "weight_v") if old else ("original0", "original1")
    by_end = {
        name.split(".")[0] + "." + name.split(".")[-1]: r for name, r in roles(optimizer).items()
    }
    assert by_end[f"0.{direction}"] == "hidden"
    assert by_end[f"0.{gain}"] == by_end[f"2.{gain}"] == "vector"
    assert by_end[f"2.{direction}"] == "head"


def test_spectral_norm_is_not_disturbed_by_looking():
    layer = parametrizations.spectral_norm(nn.Linear(8, 6))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    optimizer = muon_for(nn.Sequential(layer, nn.Linear(6, 2)))
    assert with_role(optimizer, "hidden") == {"0.parametrizations.weight.original"}
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())


# --- wrappers, frozen and lazy parameters


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compile", "parallel"])
def test_wrapped_models_give_the_same_groups_and_names(wrap):
    model = SmallGPT("tied")
    plain, wrapped = muon_for(model), muon_for(wrap(model))
    assert wrapped.routes == plain.routes
    assert str(wrapped.state_dict()) == str(plain.state_dict())


def test_compiled_blocks_keep_their_names():
    model = SmallGPT("functional")
    expected = muon_for(model).routes
    model.blocks[0] = torch.compile(model.blocks[0])
    assert muon_for(model).routes == expected
    muon_for(model, rules=[("blocks.0._orig_mod.qkv.weight", AdamW())])  # the long name serves too


def test_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = SmallGPT("untied")
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert muon_for(wrapped).routes == muon_for(model).routes
    finally:
        torch.distributed.destroy_process_group()


def test_a_wrapper_of_ones_own_changes_names_only():
    optimizer = muon_for(Bag(module=SmallGPT("functional")))
    plain = roles(muon_for(SmallGPT("functional")))
    assert roles(optimizer) == {f"module.{name}": role for name, role in plain.items()}


def test_frozen_parameters_are_left_out_and_listed():
    model = mlp(8, 16, 16, 3)
    model[0].requires_grad_(False)
    optimizer = muon_for(model)
    assert optimizer.routes["0.weight"] == Route(
        "0.weight",
        (16, 8),
        "16×8",
        "left out",
        None,
        None,
        (),
        "",
        "–",
        None,
        "frozen: requires_grad=False",
        None,
        128,
    )
    assert all(p is not model[0].weight for g in optimizer.param_groups for p in g["params"])


def test_a_parameter_unfrozen_later_is_listed_once():
    model = mlp(8, 16, 16, 3)
    model[0].requires_grad_(False)
    optimizer = muon_for(model)
    optimizer.add_param_group({"params": [("0.weight", model[0].weight.requires_grad_())]})
    assert [row.algorithm for row in optimizer.routes if row.name == "0.weight"] == ["Muon"]


def test_lazy_parameters_are_an_error():
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet.*run one batch"):
        muon_for(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2)))


# --- heads


class TwoTowers(nn.Module):
    """Two encoders and their projections to one space, as CLIP."""

    def __init__(self, space: int) -> None:
        super().__init__()
        self.text_model, self.vision_model = mlp(16, 16, 16), mlp(24, 24, 24)
        self.visual_projection = nn.Linear(24, space, bias=False)
        self.text_projection = nn.Linear(16, space, bias=False)


@pytest.mark.parametrize("space", [12, 16, 24])
def test_projections_to_one_space_have_one_role(space):
    """Also where the space is as wide as a layer of one of the towers."""
    routes = muon_for(TwoTowers(space)).routes
    assert (
        routes["visual_projection.weight"].role == routes["text_projection.weight"].role == "head"
    )


def test_the_last_layer_of_an_autoencoder_has_one_role_however_it_is_held():
    def parts():
        return {"encoder": mlp(20, 16, 4), "decoder": mlp(4, 16, 20)}

    for model in (nn.ModuleDict(parts()), nn.Sequential(*parts().values()), Bag(**parts())):
        last = [row for row in muon_for(model).routes if row.shape == (20, 16)]
        assert [(row.role, row.why) for row in last] == [("head", "head: the model's last layer")]


def test_twins_in_a_dict_are_no_heads():
    experts = nn.ModuleDict({name: mlp(16, 8, 16) for name in "abc"})
    assert {row.role for row in muon_for(Bag(experts=experts)).routes} == {"hidden", "vector"}


def test_two_classes_are_no_rows_of_a_table_of_two_kinds():
    model = Bag(words=nn.Embedding(50, 16), kinds=nn.Embedding(2, 16), classifier=nn.Linear(16, 2))
    model.trunk = mlp(16, 16, 16)
    model.classifier = model._modules.pop("classifier")
    assert muon_for(model).routes["classifier.weight"].why == "head: the model's last layer"
