"""Profiles and plans as the files of other engines, one module per target."""
