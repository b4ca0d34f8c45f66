"""Three hospitals learn for which department a note is, and share none: `python -m examples.reports`."""
