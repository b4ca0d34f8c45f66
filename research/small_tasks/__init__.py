"""Studies on tasks that every machine has, and counts without any data."""
