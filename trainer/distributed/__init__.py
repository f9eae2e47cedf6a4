"""Several ranks: Accelerate and FSDP2, failures on one rank, signals, steps that are not finite."""
