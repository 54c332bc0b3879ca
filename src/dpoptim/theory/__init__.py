"""The papers' settings and bounds as functions of public numbers. Nothing here sets noise."""
