"""Several processes: sharding, errors on one of them, SIGTERM, steps that are not finite."""
