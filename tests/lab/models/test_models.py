"""The two networks: their shapes give the paper's tables, and their outputs are as documented."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from polarstep.rng import generator
from polarstep_lab.flops import CIFAR10, METHODS, NANOGPT, TABLE_2, Workload, gflops
from polarstep_lab.models.convnet import ConvNet, ConvNetConfig
from polarstep_lab.models.gpt import GPT, GPTConfig, rotary_table
from polarstep_lab.optimizers.build import optimizer_gflops
from polarstep_lab.recipes import resolve


def on_meta(kind, config):
    with torch.device("meta"):
        return kind(config)


def small_gpt(**options):
    settings = {"vocab_size": 17, "width": 16, "layers": 2, "heads": 2, "context": 12} | options
    return GPT(GPTConfig(**settings), generator(0, "test"))


def trained_a_little(model):
    """Add noise to all weights: zero-initialized projections hide everything before them."""
    with torch.no_grad():
        for index, p in enumerate(model.parameters()):
            p.add_(0.1 * torch.randn(p.shape, generator=generator(index, "noise")))
    return model


# --- the paper's shapes --------------------------------------------------------------------------


def test_the_gpt_has_the_papers_matrices():
    model = on_meta(GPT, resolve("nanogpt", "muon").model)
    assert Counter(model.matrix_shapes()) == {(768, 768): 40, (3072, 768): 24}
    assert model.config.layers == 11


def test_the_gpts_matrices_give_the_ledgers_table():
    shapes = on_meta(GPT, resolve("nanogpt", "muon").model).matrix_shapes()
    found = Workload.from_shapes("nanogpt", shapes, elementwise=0, rank=200)
    assert set(found.matrices) == set(NANOGPT.matrices)
    for method, ours in gflops(replace(NANOGPT, matrices=found.matrices)).items():
        assert ours == pytest.approx(TABLE_2["nanogpt"][method], rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_cifar10_run_costs_what_table_2_says(method):
    config = resolve("cifar10", method)
    model = on_meta(ConvNet, config.model)
    assert optimizer_gflops(model, config) == pytest.approx(TABLE_2["cifar10"][method], rel=3e-3)


@pytest.mark.parametrize("method", [name for name in METHODS if "Muon" in name])
def test_a_nanogpt_run_costs_what_table_2_says_but_for_the_papers_extra_embeddings(method):
    config = resolve("nanogpt", method)
    ours = optimizer_gflops(on_meta(GPT, config.model), config)
    assert ours == pytest.approx(TABLE_2["nanogpt"][method], rel=0.016)


def test_the_cnn_has_the_papers_matrices_and_parameters():
    model = on_meta(ConvNet, ConvNetConfig())
    assert Counter(model.matrix_shapes()) == dict(CIFAR10.matrices)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == 1_971_352
    assert trained - sum(m * n for m, n in model.matrix_shapes()) == CIFAR10.elementwise


# --- the GPT -------------------------------------------------------------------------------------


def test_it_begins_near_the_uniform_distribution_and_reads_nothing_of_the_global_generator():
    before = torch.get_rng_state()
    model = small_gpt()
    assert torch.equal(torch.get_rng_state(), before)
    logits = model(torch.arange(12)[None])
    loss = torch.nn.functional.cross_entropy(logits[0], torch.arange(12))
    assert loss.item() == pytest.approx(math.log(17), abs=0.05)
    for name, p in model.named_parameters():
        zero = name.endswith(("output.weight", "down.weight"))
        assert (p.count_nonzero() == 0) == zero, name


def test_weights_are_a_function_of_the_generator():
    a, b = (dict(small_gpt().named_parameters()) for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_future_is_not_seen():
    model = trained_a_little(small_gpt())
    tokens = torch.randint(0, 17, (1, 12), generator=generator(1))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 17
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 0


def test_rotary_scores_depend_on_the_distance_alone():
    from polarstep_lab.models.gpt import _rotate

    cos, sin = rotary_table(32, 8, 10_000.0)
    q, k = torch.randn(2, 8, generator=generator(2), dtype=torch.float64)
    q, k = (_rotate(x.expand(32, 8), cos.double(), sin.double()) for x in (q, k))
    scores = q @ k.T
    for distance in (-5, 0, 3):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)
    assert torch.allclose(q.norm(dim=1), q.norm(dim=1)[:1])


def test_logits_are_capped():
    model = small_gpt(softcap=2.0)
    with torch.no_grad():
        model.head.weight.mul_(1e4)
    assert model(torch.arange(12)[None]).abs().max() <= 2.0


def test_layers_without_attention_and_spare_matrices():
    model = small_gpt(layers=3, attention_free=(1,), spare_mlps=1)
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if name.startswith("blocks.1.attention")]
    model(torch.arange(12)[None]).sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == ["spare_mlps.0.up.weight", "spare_mlps.0.down.weight"]


def test_a_sequence_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="13 tokens are more than the context of 12"):
        small_gpt()(torch.zeros(1, 13, dtype=torch.int64))


@pytest.mark.parametrize(
    "bad", [{"width": 15}, {"heads": 16}, {"layers": 0}, {"attention_free": (2,)}, {"softcap": 0.0}]
)
def test_bad_shapes_are_refused(bad):
    with pytest.raises(ValueError, match=f"model.{next(iter(bad))}"):
        small_gpt(**bad)


# --- the CNN -------------------------------------------------------------------------------------


def images(count=64):
    """Smooth images: neighbouring pixels are alike, as in photographs."""
    coarse = torch.rand(count, 3, 8, 8, generator=generator(3))
    return torch.nn.functional.interpolate(coarse, 32, mode="bilinear") - 0.5


def test_whitened_patches_are_uncorrelated():
    model = ConvNet(ConvNetConfig(whitening_eps=1e-12), generator(0, "test"))
    model.whiten(images())
    with torch.no_grad():
        out = torch.nn.functional.conv2d(images(), model.whitening.weight)
    flat = out.permute(0, 2, 3, 1).reshape(-1, 24)[:, :12].double()
    covariance = flat.T @ flat / len(flat)
    assert torch.allclose(covariance, torch.eye(12, dtype=torch.float64), atol=1e-3)
    assert torch.equal(out[:, :12], -out[:, 12:])
    assert not model.whitening.weight.requires_grad


def test_filters_begin_as_the_identity():
    model = ConvNet(ConvNetConfig(), generator(0, "test"))
    conv = model.groups[1].conv1
    x = torch.randn(1, 64, 5, 5, generator=generator(4))
    assert torch.allclose(conv(x)[:, :64], x)


def test_cnn_output_and_frozen_scales():
    before = torch.get_rng_state()
    model = ConvNet(ConvNetConfig(widths=(8, 16, 16)), generator(0, "test"))
    assert torch.equal(torch.get_rng_state(), before)
    model.whiten(images())
    logits = model(images(4))
    assert logits.shape == (4, 10)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    for name, p in model.named_parameters():
        frozen = name == "whitening.weight" or (".norm" in name and name.endswith("weight"))
        assert (p.grad is None) == frozen, name


@pytest.mark.parametrize("bad", [{"widths": (8, 8)}, {"norm_momentum": 1.0}, {"whitening_eps": 0}])
def test_bad_cnn_configs_are_refused(bad):
    with pytest.raises(ValueError, match=f"model.{next(iter(bad))}"):
        ConvNetConfig(**bad)
