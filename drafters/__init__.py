"""Training, checking and exporting learned drafters for speculative decoding."""

__version__ = "0.1.0"
