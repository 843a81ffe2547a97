"""What gradient-matching attacks share: the problem, priors, optimisers, options, simulated local steps."""
