"""Memory that is used again, and pages that cost less."""
