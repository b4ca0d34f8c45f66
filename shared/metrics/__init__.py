"""A run's measurements as rows, and the places to write them to."""
