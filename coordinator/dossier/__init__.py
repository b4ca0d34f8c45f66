"""The documents of a run's dossier, and their signature. Imports `db`, `domain`, `operations` and `services`."""
