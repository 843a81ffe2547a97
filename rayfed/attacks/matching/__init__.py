"""Parts shared by gradient-matching attacks: the problem, priors, optimisers, options, simulated local steps."""
