"""Methods for benchmarks only: a process has them if TESSERA_METHODS names this folder."""
