"""The figures of the pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pages.numbers import Number

FIGURES: dict[str, Callable[[Mapping[str, Number]], str]] = {}
"""A figure by its path in the repository."""
