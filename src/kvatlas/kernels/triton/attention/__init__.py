"""Paged attention: what a call is, schedules, launches, and their device code."""
