"""Meetings on a c10d store: what ranks post, when it counts, and the verdict that comes of it."""
