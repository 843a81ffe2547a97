"""Threat model: what an attacker observes of a client and what it knows besides."""
