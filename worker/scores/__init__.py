"""Figures that are means over examples, of answers and of a method's own. Imports `data`, `model` and `training`."""
