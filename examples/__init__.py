"""Things to try that need nothing but this checkout."""
