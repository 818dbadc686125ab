"""Experiments and the command line: imports gspace, is never imported by it."""
