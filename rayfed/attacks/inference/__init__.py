"""Attacks that infer facts about a victim's data without reconstructing samples, one per file."""
