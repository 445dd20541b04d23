"""Devices and links: their speeds, measured or from data sheets."""
