"""Pre-trained models and data that ship inside packages."""
