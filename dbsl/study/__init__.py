"""Which batch size is worth having: tuned trials on a workload."""
