"""What a rank does in a step, and when: measured."""
