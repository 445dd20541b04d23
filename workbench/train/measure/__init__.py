"""How long layers, devices, links and overlap take."""
