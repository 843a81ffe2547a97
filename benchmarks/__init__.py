"""Benchmarks: each prints ratios from one run; none is a timed test."""
