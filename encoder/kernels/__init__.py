"""GPU kernels of the packed vision towers, each beside a plain torch twin that runs everywhere.

Public functions live in `attention.py`, `norms.py`, `elementwise.py`, `gather.py` and `fp8.py`; they choose the kernel
or the twin by the tensor's device and import the GPU code (`triton_*.py`, `hopper_attention.py`) only when it will run.
"""
