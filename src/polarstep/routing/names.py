"""What models call things: the names, attributes and classes by which routing knows their layers.

Names are weak evidence. They count together with shapes, or for a bare ``nn.Parameter``, which has no
type.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.rnn import RNNCellBase

Role = Literal["hidden", "adapter", "embedding", "head", "router", "vector"]
ROLES: tuple[Role, ...] = get_args(Role)

# --- wrappers and layers

# Attributes under which a wrapper holds the module it wraps: torch.compile, activation
# checkpointing and FullyShardedDataParallel.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
RECURRENT = (nn.RNNBase, RNNCellBase)
NORMS = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
CONTAINERS = (nn.ModuleList, nn.ModuleDict)

# --- output heads

# Layers that make shifts and scales for a norm, as in diffusion transformers. They may be registered
# after the output layer, and what they compute does not leave the model.
MODULATION = re.compile(r"(^|\.)(ada_?ln|ada_?norm|film|modulation)", re.IGNORECASE)
# Names of output layers. They count only together with outputs that no layer, or no later one, reads.
HEAD_NAMES = re.compile(
    r"(^|_)(heads?|classifier|predict(or|ion)?s?|logits?|scores?)(_|$)", re.IGNORECASE
)

# Embeddings that are no tables of words. A layer with as many outputs as there are positions is no head.
OTHER_TABLES = re.compile(r"pos(ition)?(al|s)?(_|$)|wpe|type|segment", re.IGNORECASE)
# A table of fewer entries, as of two kinds of tokens, says nothing of a layer with as many outputs.
FEWEST_ENTRIES = 8

# --- roles of bare parameters, and routers

TABLE_WORDS = ("embed", "embedding", "embeddings", "pos", "position", "positional", "ape")
NAME_HINTS: dict[Role, frozenset[str]] = {
    "embedding": frozenset(
        (
            *TABLE_WORDS,
            *("emb", "wte", "wpe", "token", "tokens", "latents", "prompt"),
            *("queries", "codebook", "codebooks"),
        )
    ),
    "vector": frozenset(
        (
            *("bias", "biases", "scale", "scales", "gain", "gains", "gamma", "beta", "log", "norm"),
            *("alpha", "alphas", "lambda", "lambdas"),
        )
    ),
}
CLASS_HINTS: dict[Role, frozenset[str]] = {
    "embedding": frozenset(TABLE_WORDS),
    "vector": frozenset(("norm",)),
}

UNEMBED_WORDS = frozenset(("unembed", "unembedding"))
HEAD_WORDS = frozenset(("head", "logits", "classifier", "output", "out"))
ROUTER_WORDS = frozenset(("router", "routing", "gate", "gating", "wg"))
# Attributes in which a module or its configuration states the number of experts.
NUM_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "n_experts",
)

# --- projections that are fused in one weight

ATTENTION = re.compile(
    r"qkv|kqv|query_key_value|queries_keys_values|c_attn|^att_proj$|^w_?pack$", re.IGNORECASE
)
KEY_VALUE = re.compile(r"^(to_)?kv(_proj)?$|^key_value$|^keys_values$", re.IGNORECASE)
QUERY_KEY = re.compile(r"^(to_)?qk$", re.IGNORECASE)
LATENT = re.compile(r"^kv_b_proj$|^wkv_b$")
GATED = re.compile(r"gate_(and_)?up|up_gate|^w12$|^wi$", re.IGNORECASE)
IN_PROJ = re.compile(r"^in_proj$")
SELECTIVE = re.compile(r"^x_proj$")
FUSED = re.compile(
    "|".join(each.pattern for each in (ATTENTION, KEY_VALUE, QUERY_KEY, LATENT, GATED, IN_PROJ)),
    re.IGNORECASE,
)
# Names of the layer that reads the result of a fused layer, as the projection back from attention.
READERS = re.compile(
    r"^(out|o|c|linear|down)?_?proj(_out)?$|^(to_)?out$|^dense(_4h_to_h)?$|^w_?o$|^down$|^w[23]$|^fc2$"
    r"|^attn_out$|^output$",
    re.IGNORECASE,
)
# Attention that stores q, k and v head by head (or by groups of heads).
BY_HEAD = re.compile(
    r"GPTNeoX|Bloom|Persimmon|Falcon|InternLM2|GPTBigCode|^Disentangled|Lightning|^LiteMLA"
)
# Tensor-parallel blocks in the weights of CodeGen, each with its own q, v and k.
CODEGEN_BLOCKS = 4
# The order of parts is not known for these; whoever knows it can give splits.
UNCERTAIN = re.compile(r"query_key_value|linear_qkv|qkvz|qkvg")

NUM_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads", "num_q_heads")
NUM_KV_HEADS = (
    *("num_kv_heads", "num_key_value_heads", "kv_heads", "n_kv_heads", "num_heads_kv"),
    "num_query_groups",
)
# Linear attention, as Qwen3.5's, has a number of heads for q and k, and another for v and the output.
NUM_QUERY_HEADS = (*NUM_HEADS, "num_k_heads")
NUM_VALUE_HEADS = ("num_v_heads",)
HEAD_WIDTH = ("head_dim", "head_size", "dim_head", "d_head", "attention_head_size", "kv_channels")
# torchtitan's name for the number of query heads that come before each key and value.
PER_GROUP = "heads_per_kv"
# Megatron's name for the width of a head; its attention stores q, k and v by groups of heads, as
# torchtitan's does, and each rank has some of the groups.
MEGATRON_WIDTH = "hidden_size_per_attention_head"
GATED_WIDTHS = (
    "intermediate_size",
    "intermediate_dim",
    "expert_dim",
    "hidden_features",
    "ffn_dim",
    "d_inner",
)

# --- projections of attention that are layers of their own

# The letter of a projection by the name of its layer; kv_b_proj and fused names are above.
PROJECTIONS = {
    letter: re.compile(
        rf"^(to_|add_|linear_|w_?)?{letter}(_proj|_lin|_linear|_attn|_b_proj|_b|_up_proj|_proj_weight)?$"
        rf"|^{word}(_proj|_layer)?$",
        re.IGNORECASE,
    )
    for letter, word in (("q", "query"), ("k", "key"), ("v", "value"))
}
PROJECTIONS["o"] = re.compile(
    r"^(o|out|c|linear|attn)_proj$|^(to_|attn_|linear_)?out$|^out_lin(ear)?$|^dense$|^w_?o$|^o$"
    r"|^proj(ect)?(_out)?$|^linear_proj$|^output$",
    re.IGNORECASE,
)
ATTENTION_MODULES = re.compile(r"attn|attention", re.IGNORECASE)

# --- weights that are stored inputs × outputs

# Attributes in which a layer with one weight states its inputs and its outputs.
LAYER_WIDTHS = (
    ("in_features", "out_features"),
    ("nx", "nf"),
    ("input_size", "output_size"),
    ("in_dim", "out_dim"),
)
# Attributes in which a module with stacked experts states the width that its first matrices read.
HIDDEN_WIDTHS = ("hidden_size", "hidden_dim", "d_model", "in_features")
# Classes that compute x @ W. The last resort, for matrices that are square.
COMPUTE_X_W = re.compile(r"^Conv1D$|^Llama4TextExperts$|^GptOssExperts$")
READS_HIDDEN = re.compile(r"gate|up|w1|w3|in", re.IGNORECASE)
# Names of an expert's last matrices, which write to the hidden state.
WRITES_HIDDEN = re.compile(r"down|w2|out|^o_|^wo$", re.IGNORECASE)
# The first letters of bare weights, as w1 or W_up, and of the biases beside them.
BIAS_LETTERS = (("w", "b"), ("W", "b"), ("W", "B"))

# --- adapters

# The parts of LoRA, which add to a layer and are no layers of the model.
LORA = re.compile(r"^lora_")
LORA_FACTOR = re.compile(r"^lora_(embedding_)?([abAB])$")
LORA_MAGNITUDE = re.compile(r"(^|\.)lora_magnitude_vector(\.|$)")
