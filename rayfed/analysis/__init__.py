"""Analysis of a run's tables: verdicts, summaries, Pareto fronts, recommendations and comparisons."""
