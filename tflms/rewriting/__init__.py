"""Formal rules, read from data, and the one engine that applies them."""
