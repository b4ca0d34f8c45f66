"""What several tests need: a real coordinator on a free port, and workers that follow a script."""
