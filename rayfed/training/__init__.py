"""A client's local update with its chain of defences, and the cohort form of the same."""
