"""Pictures of the results; they read CSV files alone."""
