"""Trials of the kernel for `probe.py`: one module for each part. Each trial makes the calls of the real build."""
