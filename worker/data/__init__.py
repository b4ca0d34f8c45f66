"""A site's data sets: the registry of their kinds, and what every kind provides. Imports `errors`, `model` and
`state`."""
