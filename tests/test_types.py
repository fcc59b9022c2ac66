"""What a user's type checker sees: ``make lint`` runs mypy on this file, as on a script of a user."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor, nn

import polarstep as ps
from polarstep.certificate import Monitor


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def test_a_closure_may_return_a_number_or_a_tensor() -> None:
    net = model()
    optimizer = ps.muon_for(net, lr=0.02)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = net(torch.ones(4, 8)).square().mean()
        value.backward()
        return value

    def number() -> float:
        return loss().item()

    assert_type(optimizer, ps.Muon)
    assert_type(optimizer.step(loss), Tensor)
    assert_type(optimizer.step(number), float)
    optimizer.step()


def test_what_the_constructors_take_and_give() -> None:
    net = model()
    assert_type(ps.muon_for(lr=0.02, polar=ps.Auto("cheap"))(net), ps.Muon)
    rules = [("0.*", ps.SGD(lr=0.1)), ("4.bias", None)]
    ps.muon_for(net, 0.02, polar="auto", others=ps.AdamW(lr=3e-4), rules=rules)
    ps.muon_for(net, rules=[(nn.Linear, "muon"), (lambda name, p: p.ndim < 2, None)])
    ps.muon_for(net, transform=ps.NormalizedRows(), shape_scale=lambda m, n: 1.0)
    ps.Muon((p for p in net.parameters() if p.ndim == 2), lr=torch.tensor(0.1))
    ps.Muon([(name, p) for name, p in net.named_parameters() if p.ndim == 2])
    head = ps.LowRank(48, sketch=ps.Warm(), inner=ps.NewtonSchulz(4, "polar-express-sketch"))
    optimizer = ps.Muon(
        [nn.Linear(8, 8).weight], polar=ps.Deflated(head, ps.NewtonSchulz(1, "flat"))
    )
    assert_type(optimizer.routes.rows[0].why, str)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    Monitor(optimizer, every=10).close()


def test_maps_and_certificates() -> None:
    M = torch.eye(4)
    T = ps.LowRank(rank=2)(M, generator=torch.Generator())
    assert_type(T, Tensor)
    assert_type(ps.certify(M, T), ps.Certificate)
    assert_type(ps.certify(M, T).gamma, Tensor)
