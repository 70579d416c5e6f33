"""Staging: local files, project files, bundles to upload, and downloads."""
