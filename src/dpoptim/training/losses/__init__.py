"""Losses as loops hand them over, and what may not be in them."""
