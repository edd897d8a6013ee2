"""Kernels in CUDA C++ for Hopper's matrix units and copy engine, compiled at run time by NVRTC."""
