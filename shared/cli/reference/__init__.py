"""Pages of the documentation that are made from the code when they are read."""
