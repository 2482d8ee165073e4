"""What a setting is: its field, flag and YAML name, bounds, and how what is unset is completed."""
