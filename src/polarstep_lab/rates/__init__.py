"""Rates of convergence, measured: the study behind the paper's theorems."""
