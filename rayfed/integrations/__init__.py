"""Integrations with other frameworks, one per file, imported on use."""
