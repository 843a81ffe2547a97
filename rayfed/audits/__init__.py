"""Audits of a model and its data, of recorded updates, and of privacy accounts."""
