"""The implementations, one folder each; imported as kvhal.backends.<name>."""
