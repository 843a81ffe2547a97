"""Results: runs and sweeps as Python objects."""
