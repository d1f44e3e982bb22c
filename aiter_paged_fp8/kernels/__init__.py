"""Native kernels."""
