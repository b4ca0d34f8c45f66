"""One table of all methods, on the same tasks with the same budget."""
