"""A parameter whose state has another shape is refused before anything is read from its memory."""

from __future__ import annotations

import pytest
import torch
from tests.routing.sample_models import mlp
from torch import nn

from polarstep import SGD, AdamW, muon_for


def with_vocabulary(size):
    return nn.Sequential(nn.Embedding(size, 8), *mlp(8, 8, 8, 2))


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("others", [AdamW(), SGD()])
def test_an_embedding_that_was_resized_after_a_step(others):
    model = with_vocabulary(10)
    optimizer = muon_for(model, others=others)
    step(model, optimizer)
    table = model[0].weight
    table.data = torch.zeros(4000, 8)  # as resize_token_embeddings does; no read beyond it succeeds
    table.grad = None
    before = model[1].weight.detach().clone()
    with pytest.raises(
        ValueError, match=r"of 0\.weight is \(10, 8\), and the param.*\(4000, 8\): exp"
    ):
        step(model, optimizer)
    assert torch.equal(before, model[1].weight)  # nothing has been updated
    optimizer.state.pop(table)
    step(model, optimizer)
    assert not torch.equal(before, model[1].weight)


def test_a_hidden_matrix_that_was_resized_after_a_step():
    model = with_vocabulary(10)
    optimizer = muon_for(model)
    step(model, optimizer)
    model[1].weight.data, model[1].bias.data = torch.ones(9, 8), torch.ones(9)
    model[3].weight.data = torch.ones(8, 9)
    with pytest.raises(ValueError, match=r"momentum_buffer of 1\.weight is \(8, 8\).*\(9, 8\)"):
        step(model, optimizer)


@pytest.mark.parametrize("others", [AdamW(), SGD()])
def test_the_checkpoint_of_a_model_with_another_vocabulary(others):
    model = with_vocabulary(10)
    saved = muon_for(model, others=others)
    step(model, saved)
    optimizer = muon_for(with_vocabulary(4000), others=others)
    with pytest.raises(
        ValueError, match=r"of 0\.weight is \(10, 8\).*checkpoint is of another model"
    ):
        optimizer.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("others", [AdamW(), SGD(), None])
def test_a_parameter_that_was_transposed_after_a_step(others):
    """It has as many entries as its state, so that only the shapes tell them apart."""
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False))
    rules = [("1.*", "muon"), ("0.*", "muon" if others is None else others)]
    optimizer = muon_for(model, rules=rules)
    table = model[0].weight

    def step_on_ones():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    step_on_ones()
    table.data = table.data.t().contiguous()
    table.grad = None
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        ValueError, match=r"of 0\.weight is \(4, 8\), and the param.*\(8, 4\): expected the same"
    ):
        step_on_ones()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.state.pop(table)
    step_on_ones()
    assert not torch.equal(table, before[0])
