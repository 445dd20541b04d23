"""Memory and traffic of a plan, before it runs: pure functions, without torch."""
