"""Widgets in Chromium: their latency, frame rate and traffic."""
