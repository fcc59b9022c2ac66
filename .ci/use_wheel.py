"""Train a small model with the installed package and go on from a checkpoint: torch is enough."""

from __future__ import annotations

import io

import torch

import polarstep as ps
import polarstep.certificate
import polarstep.convert
import polarstep.theory

for polar in (None, "auto", ps.LowRank(4, 2)):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    chosen = {} if polar is None else {"polar": polar}
    optimizer = ps.muon_for(model, lr=0.02, **chosen)
    x, y = torch.randn(32, 16), torch.randint(2, (32,))
    losses = []
    for step in range(20):
        if step == 10:
            saved = io.BytesIO()
            torch.save(optimizer.state_dict(), saved)
            saved.seek(0)
            optimizer = ps.muon_for(model, lr=0.02, **chosen)
            optimizer.load_state_dict(torch.load(saved))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses

M = torch.randn(8, 12)
print(optimizer.routes)
print(ps.certify(M, ps.NewtonSchulz()(M)))
