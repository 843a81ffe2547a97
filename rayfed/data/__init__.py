"""Data sets in memory, and how their samples are dealt to clients."""
