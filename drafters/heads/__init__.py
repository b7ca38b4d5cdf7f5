"""Learned drafters, one file each; the folder is the registry."""
