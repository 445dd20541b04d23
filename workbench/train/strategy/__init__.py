"""When ranks exchange gradients or parameters, and when their optimizers move."""
