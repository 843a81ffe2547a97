"""Integrations with other frameworks, one a file, each imported only on use."""
