"""Models of real libraries: the role of each parameter, and the matrices it is read as.

A line has a name, the role and the matrices. Names have ``#`` for numbers and no ``.weight``. Vectors of
one dimension are not listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from tests.integrations.no_torchvision import put_in
from torch import nn

from polarstep import muon_for


def transformer(kind: str, **options: object) -> nn.Module:
    """A model of transformers, as small as it may be."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, re.split("For|LMHead|Model", kind)[0] + "Config")
    return getattr(transformers, kind)(config(**options))


def image_model(name: str, **options: object) -> nn.Module:
    """A model of timm."""
    if find_spec("timm") is None:
        pytest.skip("timm is not installed: make test installs it")
    put_in()
    import timm

    return timm.create_model(name, **options)


SMALL = {
    "vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": 60, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 9}
DEEPSEEK = {
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": 12,
    "kv_lora_rank": 10, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "moe_intermediate_size": 16,
}  # fmt: skip
MAMBA = {
    "vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 6,
    "time_step_rank": 4,
}  # fmt: skip
CLIP = {
    "text_config": SMALL | {"max_position_embeddings": 9},
    "vision_config": SMALL | {"image_size": 8, "patch_size": 4},
    "projection_dim": 12,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "GPT-2": (
        lambda: transformer("GPT2LMHeadModel", **GPT2),
        """
        transformer.h.#.attn.c_attn hidden 3·(24×24), stored transposed
        transformer.h.#.attn.c_proj hidden 24×24, stored transposed
        transformer.h.#.mlp.c_fc hidden 96×24, stored transposed
        transformer.h.#.mlp.c_proj hidden 24×96, stored transposed
        transformer.wpe embedding 9×24
        transformer.wte embedding 60×24
        """,
    ),
    "Llama": (
        lambda: transformer("LlamaForCausalLM", **GROUPED),
        """
        lm_head head 60×24
        model.embed_tokens embedding 60×24
        model.layers.#.mlp.down_proj hidden 24×40
        model.layers.#.mlp.gate_proj hidden 40×24
        model.layers.#.mlp.up_proj hidden 40×24
        model.layers.#.self_attn.k_proj hidden 12×24
        model.layers.#.self_attn.o_proj hidden 24×24
        model.layers.#.self_attn.q_proj hidden 24×24
        model.layers.#.self_attn.v_proj hidden 12×24
        """,
    ),
    "Phi-3": (
        lambda: transformer("Phi3ForCausalLM", **GROUPED, pad_token_id=0),
        """
        lm_head head 60×24
        model.embed_tokens embedding 60×24
        model.layers.#.mlp.down_proj hidden 24×40
        model.layers.#.mlp.gate_up_proj hidden 2·(40×24)
        model.layers.#.self_attn.o_proj hidden 24×24
        model.layers.#.self_attn.qkv_proj hidden 24×24 + 12×24 + 12×24
        """,
    ),
    "GPT-NeoX": (
        lambda: transformer("GPTNeoXForCausalLM", **SMALL),
        """
        gpt_neox.embed_in embedding 60×24
        gpt_neox.layers.#.attention.dense hidden 24×24
        gpt_neox.layers.#.attention.query_key_value hidden 3·(24×24)
        gpt_neox.layers.#.mlp.dense_4h_to_h hidden 24×40
        gpt_neox.layers.#.mlp.dense_h_to_4h hidden 40×24
        lm_head head 60×24
        """,
    ),
    "Mixtral": (
        lambda: transformer("MixtralForCausalLM", **GROUPED, num_local_experts=3),
        """
        lm_head head 60×24
        model.embed_tokens embedding 60×24
        model.layers.#.mlp.experts.down_proj hidden 3·(24×40)
        model.layers.#.mlp.experts.gate_up_proj hidden 6·(40×24)
        model.layers.#.mlp.gate router 3×24
        model.layers.#.self_attn.k_proj hidden 12×24
        model.layers.#.self_attn.o_proj hidden 24×24
        model.layers.#.self_attn.q_proj hidden 24×24
        model.layers.#.self_attn.v_proj hidden 12×24
        """,
    ),
    "gpt-oss": (
        lambda: transformer("GptOssForCausalLM", **GROUPED, num_local_experts=3, head_dim=8),
        """
        lm_head head 60×24
        model.embed_tokens embedding 60×24
        model.layers.#.mlp.experts.down_proj hidden 3·(24×40), stored transposed
        model.layers.#.mlp.experts.down_proj_bias vector 3×24
        model.layers.#.mlp.experts.gate_up_proj hidden 6·(40×24), stored transposed
        model.layers.#.mlp.experts.gate_up_proj_bias vector 3×80
        model.layers.#.mlp.router router 3×24
        model.layers.#.self_attn.k_proj hidden 16×24
        model.layers.#.self_attn.o_proj hidden 24×32
        model.layers.#.self_attn.q_proj hidden 32×24
        model.layers.#.self_attn.v_proj hidden 16×24
        """,
    ),
    "DeepSeek-V3": (
        lambda: transformer("DeepseekV3ForCausalLM", **SMALL, **DEEPSEEK),
        """
        lm_head head 60×24
        model.embed_tokens embedding 60×24
        model.layers.#.mlp.down_proj hidden 24×40
        model.layers.#.mlp.experts.down_proj hidden 8·(24×16)
        model.layers.#.mlp.experts.gate_up_proj hidden 16·(16×24)
        model.layers.#.mlp.gate router 8×24
        model.layers.#.mlp.gate_proj hidden 40×24
        model.layers.#.mlp.shared_experts.down_proj hidden 24×16
        model.layers.#.mlp.shared_experts.gate_proj hidden 16×24
        model.layers.#.mlp.shared_experts.up_proj hidden 16×24
        model.layers.#.mlp.up_proj hidden 40×24
        model.layers.#.self_attn.kv_a_proj_with_mqa hidden 14×24
        model.layers.#.self_attn.kv_b_proj hidden 32×10 + 24×10
        model.layers.#.self_attn.o_proj hidden 24×24
        model.layers.#.self_attn.q_a_proj hidden 12×24
        model.layers.#.self_attn.q_b_proj hidden 48×12
        """,
    ),
    "Mamba": (
        lambda: transformer("MambaForCausalLM", **MAMBA),
        """
        backbone.embeddings embedding 60×24
        backbone.layers.#.mixer.A_log vector 48×6
        backbone.layers.#.mixer.conv1d vector 48×1×4
        backbone.layers.#.mixer.dt_proj hidden 48×4
        backbone.layers.#.mixer.in_proj hidden 2·(48×24)
        backbone.layers.#.mixer.out_proj hidden 24×48
        backbone.layers.#.mixer.x_proj hidden 4×48 + 6×48 + 6×48
        """,
    ),
    "BERT, a classifier": (
        lambda: transformer("BertForSequenceClassification", **SMALL),
        """
        bert.embeddings.position_embeddings embedding 512×24
        bert.embeddings.token_type_embeddings embedding 2×24
        bert.embeddings.word_embeddings embedding 60×24
        bert.encoder.layer.#.attention.output.dense hidden 24×24
        bert.encoder.layer.#.attention.self.key hidden 24×24
        bert.encoder.layer.#.attention.self.query hidden 24×24
        bert.encoder.layer.#.attention.self.value hidden 24×24
        bert.encoder.layer.#.intermediate.dense hidden 40×24
        bert.encoder.layer.#.output.dense hidden 24×40
        bert.pooler.dense hidden 24×24
        classifier head 2×24
        """,
    ),
    "CLIP": (
        lambda: transformer("CLIPModel", **CLIP),
        """
        text_model.embeddings.position_embedding embedding 9×24
        text_model.embeddings.token_embedding embedding 60×24
        text_model.encoder.layers.#.mlp.fc1 hidden 40×24
        text_model.encoder.layers.#.mlp.fc2 hidden 24×40
        text_model.encoder.layers.#.self_attn.k_proj hidden 24×24
        text_model.encoder.layers.#.self_attn.out_proj hidden 24×24
        text_model.encoder.layers.#.self_attn.q_proj hidden 24×24
        text_model.encoder.layers.#.self_attn.v_proj hidden 24×24
        text_projection head 12×24
        vision_model.embeddings.patch_embedding hidden 24×48
        vision_model.embeddings.position_embedding embedding 5×24
        vision_model.encoder.layers.#.mlp.fc1 hidden 40×24
        vision_model.encoder.layers.#.mlp.fc2 hidden 24×40
        vision_model.encoder.layers.#.self_attn.k_proj hidden 24×24
        vision_model.encoder.layers.#.self_attn.out_proj hidden 24×24
        vision_model.encoder.layers.#.self_attn.q_proj hidden 24×24
        vision_model.encoder.layers.#.self_attn.v_proj hidden 24×24
        visual_projection head 12×24
        """,
    ),
    "ViT": (
        lambda: image_model("vit_tiny_patch16_224", depth=2),
        """
        blocks.#.attn.proj hidden 192×192
        blocks.#.attn.qkv hidden 3·(192×192)
        blocks.#.mlp.fc1 hidden 768×192
        blocks.#.mlp.fc2 hidden 192×768
        cls_token embedding 1×1×192
        head head 1000×192
        patch_embed.proj hidden 192×768
        pos_embed embedding 1×197×192
        """,
    ),
    "ResNet": (
        lambda: image_model("resnet18", layers=(1, 1, 1, 1)),
        """
        conv1 hidden 64×147
        fc head 1000×512
        layer1.#.conv1 hidden 64×576
        layer1.#.conv2 hidden 64×576
        layer2.#.conv1 hidden 128×576
        layer2.#.conv2 hidden 128×1152
        layer2.#.downsample.# hidden 128×64
        layer3.#.conv1 hidden 256×1152
        layer3.#.conv2 hidden 256×2304
        layer3.#.downsample.# hidden 256×128
        layer4.#.conv1 hidden 512×2304
        layer4.#.conv2 hidden 512×4608
        layer4.#.downsample.# hidden 512×256
        """,
    ),
}


def lines_of(model: nn.Module) -> list[str]:
    """The lines of the table that are seen."""
    found = {}
    for row in muon_for(model).routes:
        if len(row.shape) < 2:
            assert row.role == "vector", row.name
            continue
        name = re.sub(r"\b\d+\b", "#", row.name.removesuffix(".weight"))
        found[name, row.role, row.matrix] = None
    return sorted(" ".join(map(str, each)) for each in found)


@pytest.mark.parametrize("name", MODELS)
def test_real_models(name):
    build, expected = MODELS[name]
    with torch.device("meta"):
        model = build()
    assert lines_of(model) == sorted(filter(None, map(str.strip, expected.splitlines())))
