"""The HTTP front door of a pool."""
