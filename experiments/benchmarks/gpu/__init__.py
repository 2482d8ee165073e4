"""What only a GPU can show, in one command that may be cut off at any moment."""
