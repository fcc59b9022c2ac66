"""Which tensors are read through tensor descriptors."""

from __future__ import annotations

import pytest
import torch

from polarstep.kernels import product as descriptors


def test_addresses_and_rows_are_multiples_of_16_bytes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "interpreted", lambda: True)
    whole = torch.zeros(64, device=device)
    X = whole[:32].view(4, 8)
    assert descriptors.describable(X)
    assert descriptors.describable(X, whole[32:].view(8, 4))
    assert not descriptors.describable(whole[1:33].view(4, 8))
    assert not descriptors.describable(X, whole[:35].view(5, 7))
    assert not descriptors.describable(whole[:40].half().view(4, 10), X)


def test_a_large_symmetric_product_needs_both_operands_described(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polarstep.kernels import product
    from polarstep.kernels.product import DESCRIPTORS_FROM, _suits_descriptors

    monkeypatch.setattr(descriptors, "interpreted", lambda: True)
    monkeypatch.setattr(product, "FEWEST_TILES", 0)
    X, odd = (
        torch.zeros(1, DESCRIPTORS_FROM, k, dtype=torch.float16, device=device) for k in (16, 18)
    )
    assert _suits_descriptors(X, X.mT)
    assert not _suits_descriptors(odd, odd.mT)  # rows of 36 bytes
    assert not _suits_descriptors(X[:, 1:], X[:, 1:].mT)  # too few rows
    assert not _suits_descriptors(X.float(), X.float().mT)
    wide = torch.zeros(1, DESCRIPTORS_FROM, 32, dtype=torch.float16, device=device)
    assert not _suits_descriptors(X, wide[..., ::2].mT)  # contiguous in neither layout


@pytest.mark.parametrize(
    ("capability", "fits"), [((9, 0), True), ((10, 3), True), ((12, 0), False)], ids=str
)
def test_tiles_of_16_bits_need_the_shared_memory_of_a_server_gpu(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    fits: bool,
) -> None:
    """They take 144 KiB; a desktop's Blackwell GPU has descriptors, and 99 KiB. Eight bits take 64."""
    from polarstep.kernels import product
    from polarstep.kernels.product import DESCRIPTORS_FROM, FLOAT8, _suits_descriptors

    monkeypatch.setattr(product, "FEWEST_TILES", 0)
    monkeypatch.setattr(descriptors, "interpreted", lambda: False)
    monkeypatch.setattr(descriptors, "capability", lambda _: capability)
    X = torch.zeros(1, DESCRIPTORS_FROM, 16, dtype=torch.bfloat16, device=device)
    assert _suits_descriptors(X, X.mT) == fits
    assert _suits_descriptors(X.to(FLOAT8), X.to(FLOAT8).mT)
