"""Tables in, statements out: summaries, Pareto fronts, recommendations, comparisons."""
