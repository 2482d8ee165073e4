"""What was measured: settings, measuring programs, results, and the scripts that show them."""
