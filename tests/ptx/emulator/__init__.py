"""Executes the PTX that Triton emits for the kernels, on a CPU, and finds what a GPU could get wrong."""
