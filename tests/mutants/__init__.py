"""Seeded privacy bugs: an audit that finds nothing must be able to find something. None of this is
shipped.
"""
