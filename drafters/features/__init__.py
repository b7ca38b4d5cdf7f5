"""Where a training batch gets the target's hidden states from."""
