"""The papers' settings and bounds as functions. Nothing here sets noise."""
