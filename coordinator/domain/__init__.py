"""The rules: pure functions over frozen records. No clock, no dice, no database, no network."""
