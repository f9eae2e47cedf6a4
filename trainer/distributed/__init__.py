"""Several ranks: Accelerate and FSDP2, failures on one rank, SIGTERM, steps that are not finite."""
