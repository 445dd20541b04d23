"""What is kept of a run beside its metrics, and what is made of it later, without a cluster."""
