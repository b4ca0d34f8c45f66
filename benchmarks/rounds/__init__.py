"""What a round costs without training: `python -m benchmarks.rounds`."""
