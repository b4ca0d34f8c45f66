"""The command line: `tessera`, and the commands that need nothing but the API."""
