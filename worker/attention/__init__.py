"""Measurements of how a model attends. Imports `model`."""
