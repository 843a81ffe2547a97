"""Reports that runs and sweeps leave: `run` and `sweep` make them from tables, the other files are their parts."""
