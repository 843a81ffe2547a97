"""Adaptive attacks: searches and closed forms that use the observation model of a defended update."""
