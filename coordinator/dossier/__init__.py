"""The documents of a run's dossier. Imports `domain` and `services`."""
