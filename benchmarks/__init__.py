"""What is measured: each file is a command, `python -m benchmarks.NAME`, that prints its figures."""
