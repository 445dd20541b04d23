"""What a run needs to go on, under any plan and world size."""
