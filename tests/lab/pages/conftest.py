"""What tests of the pages share."""

from __future__ import annotations

import pytest

from pages import numbers


@pytest.fixture(scope="session")
def made():
    """All numbers of the records."""
    return numbers.made()
