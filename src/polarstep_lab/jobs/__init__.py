"""Many runs: planned from a study, made by processes here or on a Ray cluster, and shown."""
