"""Three hospitals train a classifier of notes by department, and share no note: `python -m examples.reports`."""
