"""The two networks of the paper's experiments."""
