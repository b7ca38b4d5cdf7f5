"""Training-free drafters that a learned one is weighed against."""
