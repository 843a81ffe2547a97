"""Rewrite the snapshots of all wording."""

from tests.wording import rewrite

rewrite()
