"""The commands of `encpool`, one file each: `add` declares its arguments, `run` does it.

They are imported for `encpool --help`, so what is heavy is imported inside `run`.
"""
