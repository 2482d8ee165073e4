"""From settings to all that a run trains with, its folder, and when it is to stop."""
