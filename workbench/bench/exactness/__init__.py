"""Whether plans compute what the whole model does: fixed cases, drawn ones, planted faults."""
