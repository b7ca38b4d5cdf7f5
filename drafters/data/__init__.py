"""From chat files to tokenized, masked, packed training rows."""
