"""Rounds: training of cohorts, the server's step, evaluation and attacks."""
