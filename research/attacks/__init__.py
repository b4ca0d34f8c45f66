"""Attacks on the updates that a site uploads, with and without privacy, and by what is sent."""
