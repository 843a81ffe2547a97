"""Attacks on texts: recover the numbers of the tokens."""
