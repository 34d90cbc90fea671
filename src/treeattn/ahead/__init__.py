"""Kernels compiled ahead of time, to read, to ship, and to launch without Python.

`describe` reads what a kernel is to compute, `compiled` compiles it, `manifest` says how to launch it.
"""
