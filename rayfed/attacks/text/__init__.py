"""Attacks on texts: what they rebuild is the numbers of its tokens."""
