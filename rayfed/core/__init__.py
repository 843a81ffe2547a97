"""Core: what all other packages use (seeds, losses, files, checks of inputs). It imports none of them."""
