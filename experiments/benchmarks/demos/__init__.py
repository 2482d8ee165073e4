"""What it is for, shown on this machine: uneven machines, slow links; beside Accelerate."""
