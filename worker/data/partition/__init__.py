"""Dividing a data set: among simulated sites, and into training and held-out examples. No kind is imported here."""
