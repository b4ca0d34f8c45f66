"""Four scanners, one small CLIP that stays as it is, and prompts that travel: `python -m examples.pairs`."""
