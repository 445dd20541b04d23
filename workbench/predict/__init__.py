"""Memory, traffic and time of a plan, before it runs."""
