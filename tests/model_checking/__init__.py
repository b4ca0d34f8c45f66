"""A federation on one seed: the real coordinator's code, virtual time, and everything that may go wrong.

    python -m tests.model_checking --help

`schedule` says who goes on next and who dies; `replicas` runs the real operations, conductor, storage and SQLite on
it; `actors` are workers, an orchestrator and an intruder; `invariants` looks after every step. `rules` is the same
for the pure rules alone, a hundred times as fast. `tests.mutants.planted` has the faults that all this must find.
"""
