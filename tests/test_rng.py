from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.captures import as_if_captured
from tests.forking import fork
from tests.processes import PATIENCE

from polarstep.rng import generator, key_to_seed

KEYS = st.lists(st.integers() | st.text(max_size=8), max_size=4).map(tuple)


@given(a=KEYS, b=KEYS)
def test_a_seed_is_a_function_of_its_key(a, b):
    assert 0 <= key_to_seed(*a) < 2**63
    assert (key_to_seed(*a) == key_to_seed(*b)) == (a == b)


def test_a_number_and_its_digits_are_different_keys():
    assert key_to_seed(1, 23) != key_to_seed(12, 3) != key_to_seed("1", 23)


def test_the_same_in_another_process():
    code = "from polarstep.rng import key_to_seed; print(key_to_seed(0, '768x768', 41))"
    there, _ = fork("-c", code).communicate(timeout=PATIENCE)
    assert int(there) == key_to_seed(0, "768x768", 41)


def test_streams_are_unrelated(untouched_rng):
    a, b = (torch.randn(4000, generator=generator(0, "768x768", step)) for step in (1, 2))
    assert abs((a * b).mean()) < 0.06


def test_what_a_graph_captures_is_drawn_from_the_generator_that_it_knows(monkeypatch):
    known = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", known)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with as_if_captured():
        assert generator(0, "768x768", 41, device="cuda:0") is known[0]
        assert generator(0, device="cuda") is known[1]
        on_cpu = generator(0, "768x768", 41)
    assert on_cpu.initial_seed() == key_to_seed(0, "768x768", 41)


def test_seeds_stay_what_they_were():
    """A run that is resumed with a newer version draws the same sketches."""
    assert key_to_seed(0, "768x768", 41) == 7757292290408476273


def test_there_are_no_numbers_on_the_meta_device():
    with pytest.raises(TypeError, match=r"meta device has no random numbers.*to_empty"):
        generator(0, device="meta")
