"""Reproductions of papers' tables and figures: a scenario, the paper's figures, and the comparison with ours."""
