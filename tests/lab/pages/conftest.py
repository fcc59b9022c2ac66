"""What tests of the pages share: the package that writes them."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="session")
def write():
    """What fills and checks the pages."""
    return importlib.import_module("pages.write")


@pytest.fixture(scope="session")
def number():
    """How numbers are written."""
    return importlib.import_module("pages.numbers.number")


@pytest.fixture(scope="session")
def made(write):
    """All numbers of the records."""
    return write.made()
