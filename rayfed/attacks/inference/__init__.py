"""Attacks that state something about a victim's data without rebuilding a batch, one a file."""
