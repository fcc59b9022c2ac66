"""Routes say where an embedding's rate is a small part of its entries, and nothing where it is not."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import polarstep as ps

NOTE = ", its entries 3,000 × lr: try embeddings=AdamW(lr=…)"


def model(std=1.0, device=None):
    torch.manual_seed(0)
    found = nn.Sequential(nn.Embedding(64, 32, device=device), nn.Linear(32, 32, device=device))
    with torch.no_grad():
        found[0].weight.mul_(std)
    return nn.Sequential(found, nn.Linear(32, 64, device=device))


def why(model, **options):
    return ps.muon_for(model, **options).routes["0.0.weight"].why


def test_entries_of_size_one_at_the_default_rate_are_told():
    assert why(model()) == "embedding: Embedding" + NOTE
    assert why(model(0.5)) == "embedding: Embedding"  # 1,667 × lr
    assert why(model(), others=ps.AdamW(lr=1e-4)).endswith(
        "10,000 × lr: try embeddings=AdamW(lr=…)"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"embeddings": ps.AdamW(lr=0.3)},
        {"others": ps.AdamW(lr=0.0)},  # a schedule begins there
        {"others": ps.SGD(lr=1e-4)},  # whose steps are as long as the gradient
        {"rules": [("0.0.weight", ps.AdamW(lr=0.3))]},
    ],
    ids=repr,
)
def test_nothing_is_said_of_other_rates_and_rules(options):
    assert "entries" not in why(model(), **options)


def test_nothing_is_said_of_small_entries_and_of_those_that_cannot_be_read():
    assert why(model(0.02)) == "embedding: Embedding"
    assert why(model(device="meta")) == "embedding: Embedding"
    with FakeTensorMode():
        assert why(model()) == "embedding: Embedding"


def test_an_error_about_the_model_does_not_speak_of_rates():
    with pytest.raises(ValueError, match=r"0\.weight: embedding: Embedding\n"):
        ps.muon_for(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10)))


def test_the_weights_are_left_as_they_are():
    found = model()
    before, version = found[0][0].weight.clone(), found[0][0].weight._version
    ps.muon_for(found)
    assert torch.equal(found[0][0].weight, before)
    assert found[0][0].weight._version == version
