"""What a run leaves on the disk: its folder, tables, checkpoints and clients' states, written atomically."""
