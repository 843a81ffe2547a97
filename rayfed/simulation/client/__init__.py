"""Clients of a round: local training with defences, cohorts, and the data that attackers observe."""
