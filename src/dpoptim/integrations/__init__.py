"""Private training in other libraries' loops.

Each module imports its library; this one imports none.
"""
