"""Mistakes in the use of the optimizer: what a step refuses, and what it warns of."""
