"""Settings of a run that no method owns: local training, privacy, hours. Imports no other package of `shared`."""
