"""The GPU template: one text for CUDA, ROCm, Metal, OpenCL and WebGPU, from the same parts as the CPU's."""
