"""Images from a dataset to batches on the device."""
