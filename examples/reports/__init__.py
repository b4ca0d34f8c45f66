"""Three hospitals train a classifier of notes, and share no note: `python -m tessera.examples.reports`."""
