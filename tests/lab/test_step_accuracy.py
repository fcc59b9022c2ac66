"""benchmarks/step_accuracy.py: which maps it measures, and that each of them runs."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

import polarstep as ps


@pytest.fixture(scope="module")
def accuracy():
    return importlib.import_module("step_accuracy")


def test_every_kind_of_map_is_there_also_with_normalized_rows(accuracy):
    maps = accuracy.maps(200, 768)
    rows = {type(polar) for name, polar in maps.items() if name.endswith(accuracy.ROWS)}
    assert rows == {ps.NewtonSchulz, ps.LowRank, ps.Deflated}
    deflated = [polar for polar in maps.values() if isinstance(polar, ps.Deflated)]
    assert {polar.rest.steps for polar in deflated} == {1, 2}
    heads = {type(polar.head.sketch) for polar in deflated}
    assert heads == {ps.Gaussian, ps.Kaczmarz, ps.Warm}
    assert all(len(name) <= 50 for name in maps)  # the width of the column


def test_maps_that_carry_something_are_followed_over_steps(accuracy):
    maps = accuracy.maps(200, 768)
    names = accuracy.carrying(maps)
    assert {"warm", "Deflated warm, one step"} <= set(names)
    assert not {"full space, PolarExpress 5", "Gaussian h=0", "Deflated h=1, one step"} & set(names)


def test_the_wide_maps_have_the_head_of_an_8b_layer(accuracy, capsys):
    """With few rows a head of 512 columns is as wide as the matrix, so it is narrowed here."""
    maps = accuracy.wide_maps()
    auto = ps.Auto().on(4096, 4096, torch.device("cuda"))
    sketched = replace(auto, head=replace(auto.head, always_sketch=True))
    assert sketched == maps["Deflated warm, ℓ = 512, one step"]
    assert all(polar.head.width == 512 and len(name) <= 50 for name, polar in maps.items())
    narrow = {
        name: replace(polar, head=replace(polar.head, rank=8)) for name, polar in maps.items()
    }
    rows = [*accuracy.report_synthetic(48, 48, 8, narrow, torch.device("cpu"))]
    told = capsys.readouterr().out
    assert all(name in told for name in maps)
    assert {row["variant"] for row in rows} == {*maps}
    assert all(0 <= row["result"]["nu"] < 1 for row in rows)


def test_a_zero_and_a_rank_deficient_matrix_pass_through_every_map(accuracy):
    cpu, matrices = torch.device("cpu"), accuracy.synthetic(48, 64)
    cases = {name: accuracy.Case(M, 8, cpu) for name, M in matrices.items()}
    for name, polar in accuracy.maps(8, 48).items():
        *_, updates = accuracy.applied(name, polar, [matrices] * 2, cpu)
        for what, case in cases.items():
            gamma, _, nu = case.measure(updates[what])  # raises unless T is finite, and T(0) = 0
            assert -0.3 < gamma < 1, (name, what)
            assert nu < 0.8, (name, what)
