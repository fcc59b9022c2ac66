"""The paper's experiments: configs, recipes, one training loop, records, tuning and the report."""
