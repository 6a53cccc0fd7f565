"""Timelines as files: one module a format. These read a merged timeline and decide nothing."""
