"""Threat model: the observations of an attacker, and the knowledge that a scenario grants it."""
