"""What every collective of a step brings to each rank: calls, messages, bytes; exact."""
