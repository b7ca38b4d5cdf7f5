"""The speculative loop: draft, verify, accept, commit."""
