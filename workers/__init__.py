"""One process, one GPU: the worker that decodes, packs, replays and answers, and its Ray actor."""
