"""Step after step on one rank."""
