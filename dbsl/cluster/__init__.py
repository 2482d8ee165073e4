"""Exchange of weights between workers, simulated or in processes, and optimizer steps."""
