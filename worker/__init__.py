"""What an institution runs: it polls, trains only what the round asks for, and sends back only that."""
