"""What the studies share: documents, files, tables of figures and processes."""
