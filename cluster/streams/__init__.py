"""A client's side of encoding: items leased, sent, collected, tried again elsewhere."""
