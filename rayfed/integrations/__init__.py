"""Integrations with other federated learning frameworks, one module per framework, imported on use."""
