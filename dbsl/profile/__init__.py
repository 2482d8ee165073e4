"""What this machine can do: step time, memory, and the gradient noise scale."""
