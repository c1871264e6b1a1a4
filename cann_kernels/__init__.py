"""Triton-Ascend kernels and what checks them without a device; README.md. The package uses `launch` on NPUs only."""
