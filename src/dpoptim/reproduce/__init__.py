"""The papers' tables, figures and rates, computed anew."""
