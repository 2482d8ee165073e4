"""What other people's training loops use of this project: import it as ``import dbsl``."""
