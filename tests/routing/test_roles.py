"""Which role a parameter has, in small models of one peculiarity each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.routing.sample_models import VOCABULARY, WIDTH, Bag, Block, SmallGPT, mlp, roles
from torch import nn
from torch.nn.utils import parametrizations

from polarstep import AdamW, muon_for


def linear(outputs: int, inputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def bare(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def said(module: nn.Module, **attributes: object) -> nn.Module:
    """A module with what it, or its configuration, says of itself."""
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def trunk(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def words(count: int = VOCABULARY) -> nn.Embedding:
    return nn.Embedding(count, WIDTH)


def experts(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(mlp(WIDTH, 4 * WIDTH, WIDTH) for _ in range(count))


def check(model: nn.Module, expected: dict[str, str]) -> None:
    """Compare the parameters of some roles, by names without ``.weight`` and separated by spaces."""
    found = roles(muon_for(model))
    for role, names in expected.items():
        those = {name.removesuffix(".weight") for name, its in found.items() if its == role}
        assert those == set(names.split()), role


# --- output heads


def tied_first() -> nn.Module:
    model = Bag(head=linear(VOCABULARY), wte=words(), block=Block())
    model.wte.weight = model.head.weight
    return model


def twice(part: str, first: bool) -> nn.Module:
    """As with ``self.backbone = self.net[:-1]``, registered before or after the whole network."""
    net: nn.Module = mlp(8, 16, 16, 3)
    second = net[:-1] if part == "backbone" else net[0]
    if part == "fc":
        net = Bag(one=nn.Linear(8, 16), two=nn.Linear(16, 16), fc=nn.Linear(16, 3))
        second = net.fc
    parts = {"net": net, part: second}
    return Bag(**dict(reversed(parts.items())) if first else parts)


def decision(prefix: str) -> nn.Module:
    """A decision transformer reads states and actions, and predicts them."""
    heads = {"state": linear(5), "action": mlp(WIDTH, 3), "value": linear(1)}
    return Bag(
        embed_state=linear(WIDTH, 5),
        embed_action=linear(WIDTH, 3),
        blocks=trunk(),
        **{prefix + name: head for name, head in heads.items()},
    )


def musicgen() -> nn.Module:
    """Its heads have an entry less than its embeddings, and the width of its encoder's MLP."""
    lm_heads = nn.ModuleList(linear(4 * WIDTH) for _ in range(2))
    decoder = Bag(wte=words(4 * WIDTH + 1), blocks=trunk(), lm_heads=lm_heads)
    return Bag(encoder=trunk(), decoder=decoder, join=linear(WIDTH))


def segmenter(outputs: int = 7, name: str = "classifier") -> nn.Module:
    """The last layer of a decoder is not its head."""
    head = nn.Conv2d(WIDTH, outputs, 1)
    decoder = Bag(**{name: head}, bottleneck=nn.Conv2d(12, WIDTH, 3))
    return Bag(backbone=mlp(8, 12, 12), decode_head=decoder, auxiliary=nn.Linear(12, 7))


def two_towers(space: int) -> nn.Module:
    """Two encoders and their projections to one space, as CLIP."""
    return Bag(
        text_model=mlp(16, 16, 16),
        vision_model=mlp(24, 24, 24),
        visual_projection=linear(space, 24),
        text_projection=linear(space, 16),
    )


def diffusion() -> nn.Module:
    """DiT registers the layer that makes shift and scale of the last norm after the output layer."""

    def modulation(parts: int) -> nn.Module:
        return nn.Sequential(nn.SiLU(), linear(parts * 16, 16))

    blocks = [Bag(mlp=linear(16), adaLN_modulation=modulation(6)) for _ in range(2)]
    final = Bag(linear=linear(12), adaLN_modulation=modulation(2))
    return Bag(x=linear(16, 12), blocks=nn.ModuleList(blocks), final_layer=final)


class Unembed(Bag):
    pass


PROJECTIONS = "visual_projection text_projection"
HEADS = {
    "an MLP": (lambda: mlp(8, 16, 16, 3), "4"),
    "an autoencoder, whose last width is read": (lambda: mlp(32, 4, 32), "2"),
    "untied": (lambda: SmallGPT("untied"), "head"),
    "a vocabulary as large as the width": (lambda: SmallGPT("untied", 2, WIDTH), "head"),
    "tied": (lambda: SmallGPT("tied"), ""),
    "tied, head first": (tied_first, ""),
    "tied by a function": (lambda: SmallGPT("functional", 12), ""),
    "tied by a function, without a list": (lambda: Bag(wte=words(), block=Block()), ""),
    "ImageGPT: an entry more than outputs, and square":
        (lambda: Bag(wte=words(WIDTH + 1), blocks=trunk(), lm_head=linear(WIDTH)), "lm_head"),
    "the same, not called head":
        (lambda: Bag(wte=words(WIDTH + 1), blocks=trunk(), mix=linear(WIDTH)), ""),
    "as many positions as the width": (lambda: SmallGPT("untied", context=WIDTH), "head"),
    "as many positions as a fused width": (lambda: SmallGPT("untied", context=3 * WIDTH), "head"),
    "ChineseCLIP: as many positions as the last layer has outputs":
        (lambda: Bag(position_embeddings=words(40), middle=linear(40), end=linear(WIDTH, 40)), ""),
    "registered before the trunk":
        (lambda: Bag(head=linear(VOCABULARY), wte=words(), blocks=trunk()), "head"),
    "a classifier before the trunk": (lambda: Bag(head=linear(10), blocks=trunk()), "head"),
    "two classes, and a table of two kinds":
        (lambda: Bag(words=words(), kinds=words(2), trunk=mlp(16, 16, 16), classifier=linear(2)),
         "classifier"),
    "several in a list":
        (lambda: Bag(wte=words(), block=Block(),
                     heads=nn.ModuleList(mlp(WIDTH, WIDTH, VOCABULARY) for _ in range(3))),
         "heads.0.2 heads.1.2 heads.2.2"),
    "policy and value":
        (lambda: Bag(trunk=mlp(8, 16, 16), policy=linear(4), value=linear(1)), "policy value"),
    "policy and value in a list":
        (lambda: Bag(trunk=mlp(8, 16, 16), heads=nn.ModuleList([linear(4), linear(1)])),
         "heads.0 heads.1"),
    "policy and value in a dict":
        (lambda: Bag(trunk=mlp(8, 16, 16),
                     heads=nn.ModuleDict({"p": mlp(16, 16, 4), "v": mlp(16, 16, 1)})),
         "heads.p.2 heads.v.2"),
    "policy and value as networks":
        (lambda: Bag(trunk=mlp(8, 16, 16), policy=mlp(16, 16, 4), value=mlp(16, 16, 1)),
         "policy.2 value.2"),
    "plain attributes": (lambda: Bag(a=linear(16, 20), b=linear(12), c=linear(10, 12)), "c"),
    "a backbone named twice": (lambda: twice("backbone", False), "net.4"),
    "a backbone named twice, first": (lambda: twice("backbone", True), "net.4"),
    "a layer named twice": (lambda: twice("layer", False), "net.4"),
    "a layer named twice, first": (lambda: twice("layer", True), "net.4"),
    "a head named twice": (lambda: twice("fc", False), "net.fc"),
    "predictions of what the model reads":
        (lambda: decision("predict_"), "predict_state predict_action.0 predict_value"),
    "the same without a name": (lambda: decision(""), "value"),
    "heads as wide as a hidden layer": (musicgen, "decoder.lm_heads.0 decoder.lm_heads.1"),
    "by name, at any place": (segmenter, "decode_head.classifier auxiliary"),
    "by name, but its outputs are read": (lambda: segmenter(12), "auxiliary"),
    "neither name nor place": (lambda: segmenter(name="other"), "auxiliary"),
    "a layer called head in a block":
        (lambda: Bag(out=linear(3), blocks=nn.ModuleList(
            Bag(q_head=linear(12), up=linear(WIDTH)) for _ in range(2))), "out"),
    "a stack for several codebooks":
        (lambda: Bag(decoder=Bag(blocks=trunk(), codebooks_head=Bag(weight=bare(3, WIDTH, 21))),
                     codec=mlp(8, 12, 8)), "decoder.codebooks_head codec.2"),
    "the classes of a loss":
        (lambda: Bag(trunk=mlp(8, 16, 12),
                     objective=Bag(weight=bare(3, 12), loss=nn.CrossEntropyLoss())), "objective"),
    "after a convolution made flat":
        (lambda: Bag(one=nn.Conv2d(1, 4, 3), two=nn.Conv2d(4, 8, 3), fc=linear(10, 72)), "fc"),
    "of one output": (lambda: Bag(trunk=linear(8, 8), value=linear(1, 8)), "value"),
    "blocks in a Sequential": (lambda: nn.Sequential(Block(), Block()), ""),
    "a layer after blocks in a Sequential":
        (lambda: nn.Sequential(Block(), Block(), linear(10)), "2"),
    "layers with activations in a Sequential":
        (lambda: nn.Sequential(*(nn.Sequential(x, nn.ReLU()) for x in mlp(8, 16, 12, 3)[::2])), "2.0"),
    "before the modulation": (diffusion, "final_layer.linear"),
    "an adaptive softmax":
        (lambda: Bag(trunk=mlp(8, 16, 16), out=nn.AdaptiveLogSoftmaxWithLoss(16, 40, [10, 20])),
         "out.head out.tail.0.0 out.tail.0.1 out.tail.1.0 out.tail.1.1"),
    "two towers": (lambda: two_towers(12), PROJECTIONS),
    "two towers, as wide as one": (lambda: two_towers(16), PROJECTIONS),
    "two towers, as wide as the other": (lambda: two_towers(24), PROJECTIONS),
    "an autoencoder in a dict":
        (lambda: nn.ModuleDict({"e": mlp(20, 16, 4), "d": mlp(4, 16, 20)}), "d.2"),
    "an autoencoder in a Sequential":
        (lambda: nn.Sequential(mlp(20, 16, 4), mlp(4, 16, 20)), "1.2"),
    "an autoencoder in a module": (lambda: Bag(e=mlp(20, 16, 4), d=mlp(4, 16, 20)), "d.2"),
    "a bare head by the length of a table":
        (lambda: Bag(emb=words(), trunk=linear(16), lm_head=bare(50, 16)), "lm_head"),
    "a bare head, stored the other way round":
        (lambda: Bag(emb=words(), trunk=linear(16), logits=bare(16, 50)), "logits"),
    "a bare unembedding":
        (lambda: Bag(mlp=Bag(W_in=bare(16, 64), W_out=bare(64, 16)),
                     last=Unembed(W_U=bare(16, 50), b_U=bare(50))), "last.W_U"),
    "a bare output of another length": (lambda: Bag(emb=words(), out=bare(16, 20)), ""),
    "a bare output in a block":
        (lambda: Bag(emb=words(), blocks=nn.ModuleList(
            Bag(out=bare(16, 50), up=linear(16)) for _ in range(2))), ""),
    "no multi-head attention": (lambda: nn.MultiheadAttention(8, 2), ""),
    "no encoder": (lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 32), 2, enable_nested_tensor=False), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
def test_output_heads(case):
    build, names = HEADS[case]
    check(build(), {"head": names})


@pytest.mark.parametrize(
    ("model", "name", "why"),
    [
        (mlp(8, 3, 3), "2.weight", "head: the model's last layer"),
        (SmallGPT("untied"), "head.weight", "head: a row for each entry of wte"),
        (SmallGPT("tied"), "wte.weight", "embedding: Embedding, tied to head.weight"),
        (tied_first(), "head.weight", "embedding: Embedding, tied to wte.weight"),
        (
            segmenter(),
            "decode_head.classifier.weight",
            "head: no layer reads its 7 outputs, and its name says head",
        ),
    ],
)
def test_the_table_says_how_a_head_was_found(model, name, why):
    assert muon_for(model).routes[name].why == why


# --- routers


class TopkRouter(Bag):
    pass


def mixture(gate: nn.Module, name: str = "gate", **beside: nn.Module) -> nn.Module:
    layer = Bag(**{name: gate}, **(beside or {"experts": experts()}))
    return Bag(blocks=nn.ModuleList([layer]), out=linear(3))


GATED_MLP = {"up": linear(40), "down": linear(WIDTH, 40)}
ROUTERS = {
    "a row for each expert": (lambda: mixture(linear(4)), "gate"),
    "called router": (lambda: mixture(linear(4), "router"), "router"),
    "another name": (lambda: mixture(linear(4), "choice"), ""),
    "another number": (lambda: mixture(linear(5)), ""),
    "stacked experts": (lambda: mixture(linear(3), w=Bag(up=bare(3, WIDTH, 8))), "gate"),
    "no experts in sight, fewer rows": (lambda: mixture(linear(5), "router", mlp=linear(9)), "router"),
    "a layer inside": (lambda: mixture(Bag(layer=linear(5)), "router", mix=linear(9)), "router.layer"),
    "no experts in sight, more rows": (lambda: mixture(linear(40), "router", mlp=linear(9)), ""),
    "rows for shared experts, too": (lambda: mixture(TopkRouter(weight=bare(6, WIDTH))), "gate"),
    "the gate of an MLP": (lambda: mixture(linear(40), **GATED_MLP), ""),
    "the gate of an MLP as wide as there are experts":
        (lambda: said(mixture(linear(40), **GATED_MLP), num_experts=40), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", ROUTERS)
def test_routers(case):
    build, name = ROUTERS[case]
    check(build(), {"router": name and f"blocks.0.{name}"})


@pytest.mark.parametrize("name", ["experts", "compress"])
def test_the_number_of_experts_in_the_configuration_counts_beside_experts(name):
    """DeepSeek-V4's indexer has a gate with as many rows, and no experts near it."""
    layer = said(
        Bag(gate=linear(5), **{name: linear(WIDTH)}), config=SimpleNamespace(n_routed_experts=5)
    )
    model = Bag(blocks=nn.ModuleList([layer]), out=linear(3))
    check(model, {"router": "blocks.0.gate" if name == "experts" else ""})


def test_routers_are_left_to_a_rule_of_their_own():
    row = muon_for(mixture(linear(4)), routers=AdamW(lr=7e-3)).routes["blocks.0.gate.weight"]
    assert (row.algorithm, row.factors) == ("AdamW", (pytest.approx(0.35),))  # 7e-3 at lr = 0.02
    assert row.why == "router: a row for each of 4 experts, ‘gate’ in its name"


# --- bare parameters, norms and vectors


def beside_queries(**beside: nn.Module | nn.Parameter) -> nn.Module:
    return Bag(projector=Bag(latent_query=bare(6, 8), **beside), net=mlp(9, 9, 2))


def lens() -> nn.Module:
    """b1 of w1 may be stacked as w1 is; its length says which side of w1 has the outputs."""
    return Bag(
        emb=nn.Embedding(50, 16),
        attn=Bag(W_Q=bare(4, 16, 8), b_Q=bare(4, 8), W_O=bare(4, 8, 16), b_O=bare(16)),
        experts=Bag(w1=bare(4, 64, 16), b1=bare(4, 64), w2=bare(4, 16, 64), b2=bare(4, 16)),
    )


def condensed(columns: int) -> nn.Module:
    """A CondConv mixes several filters, each a row of its weight."""
    conv = said(
        Bag(weight=bare(4, columns)), in_channels=8, out_channels=6, kernel_size=(3, 3), groups=1
    )
    return Bag(blocks=nn.ModuleList([Bag(conv=conv)]), net=mlp(9, 9, 2))


def vision() -> nn.Module:
    tables = {"cls_token": bare(1, 1, WIDTH), "pos_embed": bare(1, 5, WIDTH)}
    others = {"gate": bare(1, 5, WIDTH), "column": bare(WIDTH, 1), "mixing": bare(WIDTH, WIDTH)}
    patch = nn.Conv2d(3, WIDTH, 4, 4, bias=False)
    return Bag(**tables, **others, patch=patch, blocks=trunk(0), head=linear(10))


def in_a_layer(**members: nn.Module | nn.Parameter) -> nn.Module:
    return Bag(layers=nn.ModuleList([Bag(**members)]), out=linear(3, 12))


def named_net(name: str) -> nn.Module:
    return Bag(**{name: bare(6, 4)}, net=nn.Sequential(linear(8, 8), linear(2, 8)))


BARE = {
    "object queries": (lambda: named_net("object_queries"), {"embedding": "object_queries"}),
    "a codebook": (lambda: named_net("codebook"), {"embedding": "codebook"}),
    "lambdas": (lambda: named_net("sa_lambdas"), {"vector": "sa_lambdas"}),
    "alpha": (lambda: named_net("alpha"), {"vector": "alpha"}),
    "scales": (lambda: named_net("head_scales"), {"vector": "head_scales"}),
    "a map to queries": (lambda: named_net("query"), {"vector": "", "embedding": ""}),
    "queries that attention reads":
        (lambda: beside_queries(attention=Bag(q=linear(8, 8), k=linear(8, 8))),
         {"embedding": "projector.latent_query"}),
    "queries and keys, two maps":
        (lambda: beside_queries(key=bare(6, 8), out=linear(8, 8)), {"embedding": ""}),
    "queries of another width": (lambda: beside_queries(out=linear(8, 7)), {"embedding": ""}),
    "a vision transformer":
        (vision, {"embedding": "cls_token pos_embed", "vector": "gate column",
                  "hidden": "mixing patch", "head": "head"}),
    "a row of a state for each head, as Zamba":
        (lambda: in_a_layer(A_log=bare(2, 12, 4), D=bare(2, 12), mix=bare(12, 12)),
         {"hidden": "layers.0.mix"}),
    "D alone": (lambda: in_a_layer(D=bare(8, 12)), {"hidden": "layers.0.D"}),
    "filters made flat":
        (lambda: condensed(8 * 6 * 9), {"vector": "blocks.0.conv net.0.bias net.2.bias"}),
    "rows of another length": (lambda: condensed(100), {"hidden": "blocks.0.conv net.0"}),
    "weights and biases for each head and expert":
        (lens, {"vector": "attn.b_Q attn.b_O experts.b1 experts.b2",
                "hidden": "attn.W_Q attn.W_O experts.w1 experts.w2"}),
    "called b, and no bias":
        (lambda: Bag(w1=bare(4, 8, 16), b1=bare(4, 24), wb=bare(8, 16), b=bare(8, 16)),
         {"hidden": "w1 b1 wb b"}),
    "stacked experts":
        (lambda: Bag(moe=Bag(w1=bare(4, WIDTH, 32), up_bias=bare(4, 32)), head=linear(10)),
         {"hidden": "moe.w1", "vector": "moe.up_bias"}),
    "lists":
        (lambda: Bag(weights=nn.ParameterList([bare(4, 4), bare(4, 4)]),
                     biases=nn.ParameterList([bare(3, 4)])),
         {"hidden": "weights.0 weights.1", "vector": "biases.0"}),
    "a norm of several dimensions":
        (lambda: nn.Sequential(nn.LayerNorm([4, 6]), linear(6, 6), linear(2, 6)),
         {"vector": "0 0.bias"}),
    "a type counts more than a name":
        (lambda: Bag(pos_embedding=linear(8, 8), bias=linear(3, 8)),
         {"hidden": "pos_embedding", "head": "bias"}),
    "a hidden layer with one output":
        (lambda: Bag(gate=linear(1, 8), trunk=linear(8, 8), value=linear(3, 8)), {"vector": "gate"}),
    "depthwise filters":
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.Conv2d(4, 9, 1, bias=False),
                               nn.Conv2d(9, 2, 1, bias=False)), {"vector": "0", "hidden": "1"}),
}  # fmt: skip


@pytest.mark.parametrize("case", BARE)
def test_bare_parameters_and_vectors(case):
    build, expected = BARE[case]
    check(build(), expected)


def test_the_table_says_by_what_a_bare_parameter_was_known():
    routes = muon_for(vision()).routes
    assert routes["pos_embed"].why == "embedding: bare parameter, ‘pos’ in its name"
    assert "leading dimension 1" in routes["gate"].why
    why = muon_for(lens()).routes["experts.b1"].why
    assert why == "vector: bare parameter, the bias of w1 by its name and shape"


# --- parametrizations, wrappers, frozen and lazy parameters


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_weight_norm(old):
    norm = nn.utils.weight_norm if old else parametrizations.weight_norm
    found = roles(muon_for(nn.Sequential(norm(linear(6, 8)), nn.ReLU(), norm(linear(3, 6)))))
    gain, direction = ("weight_g", "weight_v") if old else ("original0", "original1")
    by_end = {(name[0], name.rpartition(".")[2]): role for name, role in found.items()}
    assert by_end == {
        ("0", direction): "hidden",
        ("0", gain): "vector",
        ("2", direction): "head",
        ("2", gain): "vector",
    }


def test_spectral_norm_is_not_disturbed_by_looking():
    layer = parametrizations.spectral_norm(nn.Linear(8, 6))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    check(nn.Sequential(layer, nn.Linear(6, 2)), {"hidden": "0.parametrizations.weight.original"})
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())


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
    found = roles(muon_for(Bag(module=SmallGPT("functional"))))
    plain = roles(muon_for(SmallGPT("functional")))
    assert found == {f"module.{name}": role for name, role in plain.items()}


def test_frozen_parameters_are_left_out_and_listed():
    model = mlp(8, 16, 16, 3)
    model[0].requires_grad_(False)
    optimizer = muon_for(model)
    row = optimizer.routes["0.weight"]
    assert (row.algorithm, row.why) == ("left out", "frozen: requires_grad=False")
    assert (row.shape, row.lr, row.group, row.parameters) == ((16, 8), None, None, 128)
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
