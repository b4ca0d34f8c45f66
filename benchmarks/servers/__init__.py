"""Which server moves bulk bytes for least: a benchmark."""
