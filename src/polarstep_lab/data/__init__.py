"""Data for the experiments: token shards, CIFAR-10 and the small text shipped with the package."""
