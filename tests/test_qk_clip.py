"""QK-clip: logits of a head are τ at most, with any layout of q and k."""

from __future__ import annotations

import math

import pytest
import torch
from tests.ranks import qk_clip as on_ranks
from tests.ranks.launch import launched, needs_gloo
from tests.spectra import gaussian
from torch import Tensor, nn

import polarstep as ps

HEADS, WIDTH = 4, 32
EACH = WIDTH // HEADS


def logits(x: Tensor, q: nn.Linear, k: nn.Linear, kv: int = HEADS) -> Tensor:
    """(batch, heads, tokens, tokens)"""
    queries = q(x).unflatten(-1, (HEADS, EACH)).transpose(1, 2)
    keys = k(x).unflatten(-1, (kv, EACH)).transpose(1, 2).repeat_interleave(HEADS // kv, dim=1)
    return queries @ keys.mT / math.sqrt(EACH)


def largest(found: Tensor) -> Tensor:
    return found.detach().amax(dim=(0, 2, 3))


@pytest.mark.parametrize("kv", [HEADS, 2, 1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("given", ["layers", "weights"])
def test_the_logits_of_a_large_head_become_tau_and_others_stay(kv, bias, given):
    torch.manual_seed(0)
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    q, k = (nn.Linear(WIDTH, n * EACH, bias=bias).double() for n in (HEADS, kv))
    with torch.no_grad():
        q.weight[:EACH] *= 50
    before = logits(x, q, k, kv)
    S = largest(before)
    tau = float(S[1]) * 1.5
    assert S[0] > tau > S[1]
    if given == "weights" and bias:
        pytest.skip("a weight alone has no bias to scale")
    gamma = ps.qk_clip(*((q, k) if given == "layers" else (q.weight, k.weight)), S, tau)
    torch.testing.assert_close(gamma.double(), (tau / S).clamp(max=1.0), rtol=1e-6, atol=0)
    after = logits(x, q, k, kv)
    torch.testing.assert_close(after, before * gamma[:, None, None].double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(after[:, 2:], before[:, 2:]) == bool((gamma[2:] == 1).all())


def test_latent_attention_has_its_rotary_part_apart():
    """Scores are q_nope·k_nope of the head + q_rope·k_rope, where all heads share k_rope."""
    nope, rope, value, latent = 6, 4, 5, 7
    torch.manual_seed(0)
    x, c, shared = (torch.randn(3, size, dtype=torch.float64) for size in (WIDTH, latent, rope))
    q = nn.Linear(WIDTH, HEADS * (nope + rope), bias=False).double()
    kv = nn.Linear(latent, HEADS * (nope + value), bias=False).double()

    def scores() -> tuple[Tensor, Tensor]:
        queries = q(x).unflatten(-1, (HEADS, nope + rope)).transpose(0, 1)
        keys, values = (
            kv(c).unflatten(-1, (HEADS, nope + value)).transpose(0, 1).split([nope, value], -1)
        )
        return queries[..., :nope] @ keys.mT + queries[..., nope:] @ shared.mT, values

    before, values = scores()
    S = before.detach().amax(dim=(1, 2))
    gamma = ps.qk_clip(q, kv, S, tau=float(S.min()), rotary=rope)
    after, still = scores()
    torch.testing.assert_close(after, before * gamma[:, None, None].double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(values, still)
    assert gamma.min() < 1


@pytest.mark.parametrize("S", [float("nan"), float("inf"), 100.0, -1000.0, 0.0])
def test_a_logit_that_is_not_too_large_or_not_finite_changes_nothing(S):
    q, k = (gaussian(WIDTH, WIDTH, seed=seed) for seed in range(2))
    copies = q.clone(), k.clone()
    assert torch.equal(ps.qk_clip(q, k, torch.full((HEADS,), S)), torch.ones(HEADS))
    assert torch.equal(q, copies[0])
    assert torch.equal(k, copies[1])


def trained(clipped: bool, steps: int = 60) -> float:
    """The largest logit at the end of a run that attends ever more sharply, at a large rate."""
    torch.manual_seed(0)
    q, k = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    model = nn.ModuleDict({"q": q, "k": k})
    optimizer = ps.Muon(model.parameters(), lr=0.3, weight_decay=0.0)
    for step in range(steps):
        x = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(step))
        found = logits(x, q, k)
        own = torch.arange(8).expand(4, HEADS, 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(found.flatten(0, 2) * 0.01, own.flatten()).backward()
        optimizer.step()
        if clipped:
            ps.qk_clip(q, k, largest(found), tau=100)
    return float(largest(logits(x, q, k)).max())


def test_logits_explode_without_it_and_do_not_with_it():
    assert trained(clipped=False) > 1000
    assert trained(clipped=True) < 200


def test_a_slice_of_a_fused_weight():
    fused = gaussian(3 * WIDTH, WIDTH)
    before = fused.clone()
    S = torch.tensor([400.0, 1.0, 1.0, 1.0])
    ps.qk_clip(fused[:WIDTH], fused[WIDTH : 2 * WIDTH], S)
    expected = before.clone()
    expected[:EACH] *= 0.5
    expected[WIDTH : WIDTH + EACH] *= 0.5
    torch.testing.assert_close(fused, expected)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (
            (WIDTH, WIDTH, 3),
            {},
            ValueError,
            "max_logits has 3 entries, and q has 32 rows: expected an",
        ),
        (
            (WIDTH, 20, 4),
            {},
            ValueError,
            "k has 20 rows: expected heads as wide as those of q, 8 rows",
        ),
        (
            (WIDTH, WIDTH, 4),
            {"rotary": 8},
            ValueError,
            "rotary=8 with heads of 8 rows: expected the",
        ),
        (
            (WIDTH, 12, 4),
            {"rotary": 2},
            ValueError,
            "k has 12 rows: expected for each of 4 heads 6 rows",
        ),
        ((WIDTH, WIDTH, 4), {"tau": 0}, ValueError, "tau=0: expected a number above zero, as 100"),
        (
            (WIDTH, WIDTH, 0),
            {},
            ValueError,
            "max_logits=.*expected a tensor with the largest logit of",
        ),
        (
            (None, WIDTH, 4),
            {},
            TypeError,
            "q is a NoneType: expected a torch.nn.Linear, or a weight of",
        ),
    ],
)
def test_errors(arguments, options, error, words):
    rows, keys, count = arguments
    q = None if rows is None else torch.ones(rows, WIDTH)
    with pytest.raises(error, match=words):
        ps.qk_clip(q, torch.ones(keys, WIDTH), torch.ones(count), **options)


@needs_gloo
def test_on_ranks_it_is_that_of_one_process(tmp_path):
    """FSDP2, HSDP, columns and DDP; each rank has seen other logits, and the largest count."""
    expected = on_ranks.alone()
    for there in launched(on_ranks.__name__, on_ranks.RANKS, tmp_path):
        for way, found in there.items():
            for mine, its in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, its, msg=way)
