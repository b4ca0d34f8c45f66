"""What a round of each method moves and holds for large models, counted from their configs alone."""
