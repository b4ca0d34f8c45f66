"""Where facts are kept: tables, transactions, transitions, blobs. No rule is decided here."""
