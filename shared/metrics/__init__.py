"""A run's measurements as rows, and the formats that they are exported to. Imports `api` and `methods`."""
