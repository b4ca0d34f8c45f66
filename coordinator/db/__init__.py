"""Tables, transactions and guarded state transitions. Imports `domain` and `limits`."""
