"""Lies beside ``tests/__init__.py`` so that pytest puts the repository's root on the path."""
