"""The optimizer of a run, its schedule, and the optimizers of other libraries."""
