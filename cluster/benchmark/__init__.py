"""What `encpool bench router` measures. Workers are simulated; no GPU."""
