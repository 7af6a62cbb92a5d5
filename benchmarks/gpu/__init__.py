"""The kernels on a GPU, beside what the chip gives."""
