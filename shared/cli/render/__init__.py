"""Tables, colours and progress lines of the command line."""
