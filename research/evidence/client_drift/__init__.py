"""Which blocks drift, before and after a freeze."""
