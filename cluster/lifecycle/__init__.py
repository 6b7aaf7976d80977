"""The life of workers and pools: started, watched, scaled, drained, ended; standing pools and their status."""
