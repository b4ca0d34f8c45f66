"""What coordinator, worker, client and command line must agree on. Imports neither of them, and never torch."""
