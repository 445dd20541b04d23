"""Seeded faults: plants them in copies of the sources and counts those that the tests kill."""
