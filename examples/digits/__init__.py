"""Four institutions and a reference laboratory train a small vision transformer: `tessera demo`."""
