"""What `encpool bench` measures of a pool: its router, workers, gateway, and itself beside the bare engine."""
