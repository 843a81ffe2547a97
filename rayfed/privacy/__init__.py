"""Privacy accountants: the (epsilon, delta) of a run."""
