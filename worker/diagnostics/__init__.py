"""The checks of `tessera worker doctor`. Imports `data`, `governance`, `inventory`, `settings` and `state`."""
