"""Running native kernels: which executors can run here, compiling, caching and launching."""
