"""Scores of a language model's answers. Imports `data`, `errors`, `model` and `training`."""
