"""A client's side of a round: local training with its defences, cohorts, and what observers may see of it."""
