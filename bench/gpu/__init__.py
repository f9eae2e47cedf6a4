"""First measurements on a GPU: single kernels, products, losses and a profile, with torch and triton alone."""
