"""The checks of `tessera worker doctor`. Imports `data`, `governance`, `settings` and `state`."""
