"""Clients of a round: local training with defences, and cohorts."""
