"""What keeps the runs, the rounds and the global state. It never builds a model and never imports torch."""
