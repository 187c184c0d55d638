"""What an op and a step cost on a GPU."""
