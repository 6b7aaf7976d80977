"""GPU kernels of the packed vision towers, each beside a plain torch twin that runs everywhere.

Public functions live in `attention.py`, `norms.py` and `elementwise.py`; they choose the kernel or the twin by the
tensor's device and import the GPU code (`triton_*.py`, `hopper.py`) only when it will run.
"""
