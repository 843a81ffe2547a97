"""Planted leaks: models and defences of users with a leak by construction, and controls without a leak."""
