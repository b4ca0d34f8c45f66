"""Three hospitals fine-tune models of notes, with privacy for patients: `python -m tessera.examples.clinic`."""
