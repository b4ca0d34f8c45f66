"""The stages of a task in the process that executes it: check, load, tokenize, then train or evaluate."""
