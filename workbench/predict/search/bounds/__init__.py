"""Lower bounds of predicted step times, as sums of costs along a trellis."""
