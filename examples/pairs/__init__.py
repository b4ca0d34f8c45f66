"""Four scanners train prompts for one frozen CLIP: `python -m tessera.examples.pairs`."""
