"""Methods against client drift on problems of known minimum."""
