"""Which graphs each worker holds: traffic, forecasts, plans, and their application to a running pool."""
