"""Lists of names in sentences."""

MAX_NAMES = 10
"""Maximum number of arms that a line names."""
