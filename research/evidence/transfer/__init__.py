"""Bytes, time and memory of a round for large models, counted from their configs alone."""
