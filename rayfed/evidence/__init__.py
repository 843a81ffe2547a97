"""Evidence: criteria, findings and verdicts, computed from the tables of a run. No text for readers is made here."""
