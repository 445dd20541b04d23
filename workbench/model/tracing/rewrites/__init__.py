"""Changes of a traced graph: several operations that become one, or one another."""
