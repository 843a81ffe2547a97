"""Reports, statements, charts and terminal views of runs and sweeps."""
