"""Measurements of a head and the reports made of them."""
