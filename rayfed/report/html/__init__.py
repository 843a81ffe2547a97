"""HTML reports of runs and sweeps, and their charts."""
