"""Where a batch runs: here, or at a provider."""
