"""What a run says: metrics and lines."""
