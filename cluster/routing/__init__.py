"""Which worker takes an item: the router, its views, leases and decisions."""
