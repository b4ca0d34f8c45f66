"""Three hospitals fine-tune models of clinical notes with privacy for each patient: `python -m examples.clinic`."""
