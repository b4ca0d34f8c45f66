"""Demos that need only this repository."""
