"""Faults on purpose: what is lost, and what is said, when files fail, processes die and bytes change."""
