"""Measured rates of convergence, compared with the paper's theorems."""
