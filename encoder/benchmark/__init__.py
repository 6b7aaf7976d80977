"""`encpool bench engine`: our engine beside its baselines, in one run on one device."""
