"""Strategies choose values, uses and anchors; the rules say what is legal and the engine edits."""
