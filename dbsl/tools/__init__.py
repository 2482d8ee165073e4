"""Commands around runs, which no other module imports."""
