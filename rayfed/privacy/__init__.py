"""Privacy accounting: the (epsilon, delta) guarantee of a run."""
