"""Attacks by search, one per file, and their shared code: the problem, priors, optimisers, options and local steps."""
