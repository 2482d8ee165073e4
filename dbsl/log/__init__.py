"""What a run says: metrics, lines, pictures, trackers, model card."""
