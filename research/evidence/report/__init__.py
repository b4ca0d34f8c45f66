"""The report of the tables, from the raw results."""
