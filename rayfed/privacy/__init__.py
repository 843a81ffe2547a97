"""Accountants: the (epsilon, delta) of what really ran."""
