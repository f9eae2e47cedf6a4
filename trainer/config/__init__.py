"""GRPOConfig, its checks, and the fields of TRL's."""
