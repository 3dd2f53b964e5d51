"""Strategies choose values, uses and anchors; rules say what is legal, the engine edits."""
