"""One run: the loop, the two benchmarks it trains, their optimizers, checkpoints and side logs."""
