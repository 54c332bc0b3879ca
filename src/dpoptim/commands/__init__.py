"""Commands, each in a file of its own."""
