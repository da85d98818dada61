"""Writes profiles and plans as files of other engines, with one module per format."""
