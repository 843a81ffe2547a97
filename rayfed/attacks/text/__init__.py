"""Attacks on texts, which rebuild the numbers of their tokens."""
