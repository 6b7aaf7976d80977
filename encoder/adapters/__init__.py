"""One file a model family. `base.py` is the protocol, `registry.py` the list."""
