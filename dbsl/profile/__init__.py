"""Measurements on this machine: step time, memory, and the gradient noise scale."""
