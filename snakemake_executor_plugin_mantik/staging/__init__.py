"""Staging: local files, sources, bundles to upload, and downloads."""
