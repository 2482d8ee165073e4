"""How fast training is, against what the hardware can do and against other trainers."""
