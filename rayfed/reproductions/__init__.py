"""Papers' tables and figures played again: a scenario, what the paper found, and how near we come."""
