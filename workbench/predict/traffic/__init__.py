"""What each rank receives in every collective of a step: calls, messages and bytes; exact."""
