"""Four scanners train prompts for one frozen CLIP: `python -m examples.pairs`."""
