"""GPU kernels of the packed vision towers, each beside a plain torch twin that runs everywhere.

What is called is in the files without a prefix, such as `attention.py`, `norms.py` and `rotary.py`: they choose the
kernel or the twin by the tensor's device and import the GPU code (`triton_*.py`, `hopper_attention.py`) only when it
will run.
"""
