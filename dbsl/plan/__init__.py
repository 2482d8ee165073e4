"""Who trains on how much, in which batches, at which resolution: numpy alone, no torch."""
