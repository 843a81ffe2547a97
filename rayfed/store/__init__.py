"""Storage of runs: their folders, tables, checkpoints and clients' states, written atomically."""
