"""Statements from a run's tables: summaries, Pareto fronts, recommendations, comparisons."""
