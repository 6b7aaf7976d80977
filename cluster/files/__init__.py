"""Files in, embeddings out: the `encode` and `demo` commands' reading, writing and progress."""
