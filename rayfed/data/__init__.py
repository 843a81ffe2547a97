"""Data sets in memory, and their partition among clients."""
