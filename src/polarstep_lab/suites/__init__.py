"""Many runs: planned, made in one process or in several, and shown while they go."""
