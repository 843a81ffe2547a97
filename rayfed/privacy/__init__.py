"""Privacy accountants: the (epsilon, delta) of what really ran."""
