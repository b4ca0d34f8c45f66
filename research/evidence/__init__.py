"""Evidence on pre-trained models and real data, both of which ship inside packages."""
