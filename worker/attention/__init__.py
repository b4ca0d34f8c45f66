"""Measurements of a model's attention. Imports `model`."""
