"""Attacks on texts, which recover token numbers."""
