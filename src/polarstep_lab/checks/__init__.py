"""Studies of the theory's assumptions on real runs: gradient noise, and γ over layers and steps."""
