"""Device kernels, one folder per operation."""
