"""Evidence statement of a run."""
