"""Measurements of a model's attention. Imports `errors` and `model`."""
