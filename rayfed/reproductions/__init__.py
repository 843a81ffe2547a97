"""Reproductions of papers' tables and figures: a scenario, the paper's values, and the comparison with our values."""
