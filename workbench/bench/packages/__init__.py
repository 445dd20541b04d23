"""Models that other packages bring: which of them are traced, cut and exact."""
