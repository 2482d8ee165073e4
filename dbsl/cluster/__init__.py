"""How weights move between workers, simulated or in processes, and what a step is."""
