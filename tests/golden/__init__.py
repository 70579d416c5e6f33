"""Recorded histories of small workflows, which a refactoring leaves as they are."""
