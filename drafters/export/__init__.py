"""Heads in the file formats of serving engines, checked after writing."""
